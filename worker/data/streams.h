// The random streams (common/random.h) that the data folder draws from a job's seed.
#pragma once

#include <cstdint>

namespace ps {

// Each use of the seed draws from a stream of its own, so that no two uses see the same numbers. Epoch e, below 2^32, is
// shuffled with stream e; those from 2^33 on belong to the model's initial weights.
inline constexpr uint64_t kValidationStream = uint64_t{1} << 48;
inline constexpr uint64_t kSyntheticStream = uint64_t{2} << 48;

}  // namespace ps
