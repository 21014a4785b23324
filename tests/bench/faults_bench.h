// ps_bench faults: what checkpoints cost a job while it trains, and how soon it goes on when its server was killed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

struct FaultsBenchOptions {
  int64_t bytes = 0;  // Weights and the optimizer's state together (momentum: half of each); a multiple of 8.
  std::string dir;    // Where checkpoints are written.
  int hundreds =
      5;  // So many hundreds of steps are measured, with one checkpoint in each; the server is killed as often.
};

// One worker that only exchanges, through shared memory, with one server that is a process of its own:
//   - a step without checkpoints, and with one every 100 steps (ratio: of the medians of 100 steps);
//   - the longest step of each 100 steps minus the median step, without and with them: how long a cut stalls;
//   - writing a checkpoint while nothing else happens, and while the job trains (ratio: to `dd conv=fsync` of as many
//     bytes into the same folder, which is a row of its own);
//   - from the `listening` line of a server that was killed to the worker's next applied push.
absl::StatusOr<std::vector<Measurement>> RunFaultsBench(const FaultsBenchOptions& options);

}  // namespace ps
