// ps_bench join: how soon many workers have joined a job of several shards, in this process and without a network.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

struct JoinBenchOptions {
  uint32_t workers = 500;
  uint32_t shards = 8;
  int repeats = 3;
};

// The chief and the shards are the real ones, and what they send each other is encoded and decoded as on a network:
//   - all workers join at once, until the last one is answered;
//   - one more after the others, in the place of a worker that leaves;
//   - a heartbeat of each worker, to compare the first with: a call that changes nothing.
absl::StatusOr<std::vector<Measurement>> RunJoinBench(const JoinBenchOptions& options);

}  // namespace ps
