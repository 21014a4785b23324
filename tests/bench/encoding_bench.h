// ps_bench encoding: what rounding, widening and selecting cost, next to a copy.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/bench/measurement.h"

namespace ps {

// Measures the encodings of a model of so many bytes as float32, on one thread; the ratio is a copy's time over the
// row's.
std::vector<Measurement> RunEncodingBench(int64_t bytes, int repeats);

}  // namespace ps
