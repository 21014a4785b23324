// ps_bench crowd: what each of many workers costs the servers of a job, in this process and without a network.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

struct CrowdBenchOptions {
  uint32_t workers = 1000;
  uint32_t servers = 100;
  uint32_t tensors = 1000;   // Each has one element, so that nothing but the number of workers counts.
  std::string mode = "bsp";  // Or asp.
  uint32_t burst = 1;        // So many workers join before the servers' messages move on.
  int64_t steps = 10;        // That are measured, after one that is not.
};

// CPU is that of the servers' code alone, of all servers together: of calls into the chief, the shards and their
// sessions, of what they build, and of encoding and decoding what comes and goes on control calls and streams.
struct CrowdRow {
  uint32_t workers = 0;
  double joined_s = 0;                    // From the first join until each worker is told that the job runs.
  double join_cpu_s = 0;                  // In that time, for each worker.
  double joining_bytes = 0;               // In that time, sent to shards over their streams.
  double push_cpu_s = 0;                  // For one worker's push to all servers, and its answer.
  double step_p50_s = 0, step_p99_s = 0;  // From the first worker's push until all workers have the weights.
  double step_bytes = 0;                  // In a step, sent to shards over their streams.
  double peak_bytes = 0;                  // Memory of this process, the workers' own included.
};

// The chief, the shards, the streams between them, sessions and the members' open streams are the real ones. All of it
// runs on this thread, in turn: the workers join one after another (but for `burst`), and between two of them, or of
// their pushes, one message of each stream arrives. The weights at the end are compared with those that have to come.
absl::StatusOr<CrowdRow> RunCrowdBench(const CrowdBenchOptions& options);

// With the ratio of push_cpu_s to the first row's.
std::string CrowdTable(const std::vector<CrowdRow>& rows);

}  // namespace ps
