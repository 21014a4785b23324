// Experiments with workers that are slow because they idle: so a machine of few cores plays an uneven cluster, and what
// is measured is the modes, and not its scheduler.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"

namespace ps {

struct PaceOptions {
  struct Straggler {
    uint32_t rank = 0;
    double factor = 1;  // It multiplies step_time, for all batches of the rank.
  };
  struct Delays {
    double share = 0;   // This part of all batches, drawn at random,
    double factor = 1;  // takes so many times as long.
  };
  absl::Duration step_time;  // That a batch takes at least; 0: workers never idle.
  std::optional<Straggler> straggler;
  std::optional<Delays> delays;
};

// "RANK:FACTOR" of --experiment_straggler and "SHARE:FACTOR" of --experiment_delays; none of "". INVALID_ARGUMENT names
// the flag.
absl::StatusOr<std::optional<PaceOptions::Straggler>> ParseStraggler(const std::string& text);
absl::StatusOr<std::optional<PaceOptions::Delays>> ParseDelays(const std::string& text);

// INVALID_ARGUMENT, naming the flags.
absl::Status ValidatePace(const PaceOptions& options);

// The pace of one worker, used by one thread.
class Pace {
 public:
  // Which batches are delayed depends on seed and rank alone. A stop ends the idling.
  Pace(const PaceOptions& options, uint64_t seed, uint32_t rank, std::stop_token stop);

  bool idles() const { return options_.step_time > absl::ZeroDuration(); }

  // Once for each batch: how long it is to take.
  absl::Duration Next();
  // Once for each batch, when its gradient is there: idles until it has taken Next() since `began`. The seconds idled;
  // CANCELLED if a stop was requested.
  absl::StatusOr<double> Idle(TimePoint began);

 private:
  const PaceOptions options_;
  const uint32_t rank_;
  const std::stop_token stop_;
  std::mt19937_64 random_;
};

}  // namespace ps
