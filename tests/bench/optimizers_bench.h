// ps_bench optimizers: how fast a server's update is with each optimizer, next to a copy that moves as many bytes, and
// with many small tensors next to one.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

// Measures every optimizer, with 1 and 2 threads, on one tensor of 64 MB: a copy that moves as many bytes as the update
// must (the gradient is read, weights and state are read and written), the optimizer alone, and a server's update, from
// the pushes to the published version, in place; ratios are to the copy. Then a server's update of one tensor of the
// size of 160 small ones, and of these; the ratio is to the one tensor. The weights are checked.
absl::StatusOr<std::vector<Measurement>> RunOptimizersBench(int repeats);

}  // namespace ps
