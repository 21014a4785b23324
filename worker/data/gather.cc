#include "worker/data/gather.h"

#include <algorithm>
#include <cstring>

#include "common/simd.h"

namespace ps {
namespace {

// x / 255 without a division: 1/255 = kHigh + kLow, and x * kHigh is exact for a byte x, so only the last addition
// rounds by more than 2^-40 relative. dataset_test compares all 256 values with the division.
constexpr float kHigh = 0x1.01p-8F;
constexpr float kLow = 0x1.010102p-24F;

// Of the next row; in a longer row the processor sees the pattern by itself.
constexpr int64_t kPrefetchBytes = 2048;

struct GatherBytesKernel {
  PS_KERNEL void Run(const uint8_t* base, const int32_t* indices, int64_t count, int64_t features,
                     float* __restrict out) {
    for (int64_t k = 0; k < count; ++k, out += features) {
      const uint8_t* row = base + indices[k] * features;
      // Rows come in random order, so the processor cannot guess where the next one starts.
      const uint8_t* next = base + indices[k + 1 < count ? k + 1 : k] * features;
      for (int64_t byte = 0; byte < std::min(features, kPrefetchBytes); byte += 64) __builtin_prefetch(next + byte);
      for (int64_t i = 0; i < features; ++i) {
        const float value = row[i];
        out[i] = value * kHigh + value * kLow;
      }
    }
  }
};

}  // namespace

void GatherRows(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x) {
  RunKernel<GatherBytesKernel>(BestIsa(), samples, indices, count, features, x);
}

void GatherRows(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x) {
  for (int64_t k = 0; k < count; ++k) {
    std::memcpy(x + k * features, samples + indices[k] * features, static_cast<size_t>(features) * sizeof(float));
  }
}

}  // namespace ps
