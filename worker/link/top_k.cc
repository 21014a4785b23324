#include "worker/link/top_k.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "common/simd.h"

namespace ps {
namespace {

constexpr int kBinShift = 20;  // An exponent, and three bits after the point.

// The magnitude of the k-th largest, by the bin that it falls into, and then among those in it.
uint32_t KthLargest(std::span<const float> values, size_t k) {
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

}  // namespace

void SelectLargest(std::span<const float> values, std::span<uint16_t> positions) {
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
