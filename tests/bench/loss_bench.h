// ps_bench losses: how soon a bsp job makes its next version when one of its two workers is gone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

struct LossBenchOptions {
  int64_t bytes = 0;  // The size of the weights.
  int repeats = 5;
};

// One worker is in this process; the other is a process of its own, and gone in each repeat:
//   - --on_worker_loss=continue: from its SIGKILL to the next version, less --reconnect_grace;
//   - the same, from its SIGSTOP, after which it is silent, less --lease;
//   - --on_worker_loss=wait: from the answer to the join of its replacement to the next version.
absl::StatusOr<std::vector<Measurement>> RunLossBench(const LossBenchOptions& options);

// The worker that is to be lost: joins as rank 1, prints "joined", and steps until the job ends or it is killed.
absl::Status RunLostWorker(const std::string& server, int64_t bytes);

}  // namespace ps
