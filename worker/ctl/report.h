// Summarises a finished (or killed) run from the metrics files (`--metrics_file`) of its servers and workers in one
// folder, and compares runs in a table.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// For these test accuracies, the time until they are first reached is reported.
inline constexpr std::array<double, 2> kAccuracyTargets = {0.80, 0.85};

// The staleness of all contributions that were applied on all shards. Percentiles are nearest-rank: values that
// occurred.
struct StalenessSummary {
  double p50 = 0;
  double p99 = 0;
  double max = 0;
};

// Parts of the time that all workers spent in steps; they add up to 1.
struct TimeShares {
  double compute = 0;  // Forward and backward.
  double push = 0;
  double wait = 0;  // Parked at a server.
  double pull = 0;
};

// One run. What its files do not contain is nullopt.
struct RunSummary {
  std::string name;                 // The last part of the folder's path.
  std::optional<std::string> mode;  // The name that `--mode` has; `sync` is given as `bsp`, `async` as `asp`.
  int64_t workers = 0;              // Ranks seen.
  std::optional<double>
      final_test_accuracy;  // In [0, 1], of the last evaluation on the split "test"; none for regression.
  // For each target: seconds from the beginning of the first step of any worker to the end of the first evaluation
  // on the split "test" that is at or above the target. Workers on several machines are placed by their clocks.
  std::array<std::optional<double>, kAccuracyTargets.size()> seconds_to_target;
  // The sum of what the workers say in `end`; if any of them ended without saying so, all samples in their steps
  // over the time from the first step's beginning to the last step's end.
  std::optional<double> samples_per_s;
  std::optional<StalenessSummary> staleness;
  std::optional<TimeShares> time_shares;
};

// Reads every *.jsonl file in `folder`. Events and fields it does not know are passed over; a last line cut off by a
// kill is, too, and so is a file without a whole line. NOT_FOUND: no such folder, or no events in it.
// INVALID_ARGUMENT: a malformed line, named by file and line number, or files that contradict each other.
absl::StatusOr<RunSummary> SummarizeRun(const std::string& folder);

// A row a run, aligned with spaces and set in pipes: plain text for a terminal that is a table in Markdown too. Ends
// with a newline. What is not known or never happened is "—".
std::string FormatTable(const std::vector<RunSummary>& summaries);

}  // namespace ps
