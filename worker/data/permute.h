// How the data folder draws from a job's seed (common/random.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <utility>

#include "common/random.h"

namespace ps {

// Each use of the seed draws from a stream of its own, so that no two uses see the same numbers. Epoch e, below 2^32,
// is shuffled with stream e; those from 2^33 on belong to the model's initial weights.
inline constexpr uint64_t kValidationStream = uint64_t{1} << 48;
inline constexpr uint64_t kSyntheticStream = uint64_t{2} << 48;
inline constexpr uint64_t kFunctionStream = uint64_t{3} << 48;
// Times the rank, below 4096, and plus the epoch: of samples that are a rank's own.
inline constexpr uint64_t kOwnStream = uint64_t{1} << 52;

// Puts `items` in a random order, the same on every platform (Durstenfeld's form of Fisher-Yates, 1964).
template <typename T>
void PermuteInPlace(std::mt19937_64& random, std::span<T> items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[UniformBelow(random, i)]);
}

}  // namespace ps
