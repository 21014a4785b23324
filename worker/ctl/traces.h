// `ps_ctl merge_traces`: the traces of a job's processes (common/trace.h) as one, with their clocks aligned.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// ---- Clocks, without any file

// When a push left a worker, passed through servers' spans, and its weights were back; in microseconds, each by the
// clock of the process that says it.
struct ArrowTimes {
  std::optional<double> leaves;
  std::vector<double> passes;  // As it was complete at the shard, and as the version was there that it made.
  std::optional<double> ends;
};

// What one process's file says of its clock. Times are since the process's start.
struct TraceClock {
  std::string clock;                         // Processes with the same one share a steady clock.
  double steady_us = 0;                      // By that clock, the file's time 0,
  double unix_us = 0;                        // and by the wall clock.
  std::map<std::string, ArrowTimes> arrows;  // By the arrow's number.
};

struct AlignedClock {
  enum class By {
    kSteadyClock,  // It is the first process's, or one that shares its clock.
    kArrows,       // A push is complete at a server after it left, and back after it was applied.
    kWallClock,    // No push went between this process and another whose clock is known.
  };
  By by = By::kSteadyClock;
  double offset_us = 0;  // This added to the file's times gives the first process's.
  std::optional<double>
      error_us;  // The offset is wrong by so much at most, if clocks ran equally fast; unset: unknown.
  // By so much no offset fits all pushes: the clocks ran at different speeds, or one was set. Half of it is in
  // error_us.
  double misfit_us = 0;
};

// The first process's clock is the one that the others are aligned to, along the pushes that bound them best.
std::vector<AlignedClock> AlignClocks(const std::vector<TraceClock>& clocks);

// ---- Files

inline constexpr uint64_t kMaxMergedBytes = 64 << 20;  // Viewers become slow with more.

// Writes one Chrome trace of all these files, whose processes may have been killed. Of more than `max_bytes` it has the
// beginning. What it did, for people, with each clock's error. Errors name the file, and the line: INVALID_ARGUMENT if
// it is no trace of this project, or is of another job than the others.
absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& paths, const std::string& output,
                                        uint64_t max_bytes = kMaxMergedBytes);

}  // namespace ps
