// ps_bench optimizers: how fast a server's update is with each optimizer, next to a copy that moves as many bytes, and
// with many small tensors next to one.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

// Of every optimizer, with 1 and 2 threads: an update of one tensor of 64 MB (its ratio is to the copy in the row
// before), of one of the size of 160 small ones (likewise), and of these (the ratio is to the one tensor). Bytes are
// those that an update must move: the gradient is read, weights and state are read and written. Updates are a server's
// own, from the pushes to the published version, in place. The weights are checked.
absl::StatusOr<std::vector<Measurement>> RunOptimizersBench(int repeats);

}  // namespace ps
