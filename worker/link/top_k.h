// The elements of a slice that are largest in magnitude.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "common/simd.h"

namespace ps {

// The magnitude of the k-th largest, by the bin that it falls into, and then among those in it.
inline uint32_t KthLargest(std::span<const float> values, size_t k) {
  constexpr int kBinShift = 20;  // An exponent, and three bits after the point.
  std::vector<uint32_t> bins(1U << (31 - kBinShift), 0);
  for (const float value : values) ++bins[MagnitudeBits(value) >> kBinShift];
  size_t bin = bins.size() - 1;
  size_t above = 0;
  for (; above + bins[bin] < k; --bin) above += bins[bin];
  std::vector<uint32_t> inside;
  inside.reserve(bins[bin]);
  for (const float value : values) {
    if (MagnitudeBits(value) >> kBinShift == bin) inside.push_back(MagnitudeBits(value));
  }
  const auto kth = inside.begin() + static_cast<std::ptrdiff_t>(k - above - 1);
  std::nth_element(inside.begin(), kth, inside.end(), std::greater<>());
  return *kth;
}

// The positions of the `positions.size()` largest of the values, ascending; of two of the same magnitude the one that
// comes first. There are more values than that, at most 65,536, all finite.
inline void SelectLargest(std::span<const float> values, std::span<uint16_t> positions) {
  if (positions.empty()) return;
  const uint32_t least = KthLargest(values, positions.size());
  size_t larger = 0;
  for (const float value : values) larger += MagnitudeBits(value) > least ? 1 : 0;
  size_t equal = positions.size() - larger;  // That are taken.
  size_t next = 0;
  for (size_t i = 0; next < positions.size(); ++i) {
    const uint32_t magnitude = MagnitudeBits(values[i]);
    if (magnitude < least || (magnitude == least && equal == 0)) continue;
    if (magnitude == least) --equal;
    positions[next++] = static_cast<uint16_t>(i);
  }
}

}  // namespace ps
