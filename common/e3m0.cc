#include "common/e3m0.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/half_floats.h"
#include "ps/wire_type.h"

namespace ps {
namespace {

constexpr size_t kBlockBytes = WireBytes(WireType::kE3m0, kE3m0Block);
constexpr uint32_t kSign = 8;
constexpr uint32_t kLevels = 7;  // Level L is 2^(L - 7) times the scale; 0 is 0.

// Below a smaller scale some levels would be subnormal, which processors may be set to take for 0.
constexpr float kLeastScale = 0x1p-119F;

constexpr float kSqrtHalf = 0x1.6a09e6p-1F;  // Half way between two levels, in the logarithm.

struct LargestKernel {
  PS_KERNEL void Run(size_t elements, const float* values, uint32_t* largest) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (size_t i = 0; i < elements; ++i) most = std::max(most, MagnitudeBits(values[i]));
    *largest = most;
  }
};

// Positive floats are in the order of their bits.
struct CodesKernel {
  PS_KERNEL void Run(size_t elements, const float* values, float scale, uint32_t* codes, float* left) {
    const uint32_t half_way = std::bit_cast<uint32_t>(scale * kSqrtHalf);
    const uint32_t scale_bits = std::bit_cast<uint32_t>(scale);
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const uint32_t magnitude = MagnitudeBits(values[i]);
      uint32_t level = 0;
      for (uint32_t below = 0; below < kLevels; ++below) {  // A power of two less is one less in the exponent.
        level += static_cast<uint32_t>(magnitude >= half_way - (below << 23));
      }
      const uint32_t sign = std::bit_cast<uint32_t>(values[i]) & 0x80000000U;
      const uint32_t decoded = Choose(level == 0, 0, (scale_bits - ((kLevels - level) << 23)) | sign);
      codes[i] = Choose(level == 0, 0, level | (sign >> 28));
      left[i] = values[i] - std::bit_cast<float>(decoded);
    }
  }
};

}  // namespace

bool EncodeE3m0(const float* values, size_t elements, uint8_t* encoded, float* left, Isa isa) {
  bool finite = true;
  uint32_t codes[kE3m0Block];
  float unused[kE3m0Block];
  for (size_t begin = 0; begin < elements; begin += kE3m0Block) {
    const size_t count = std::min(kE3m0Block, elements - begin);
    uint32_t largest = 0;
    RunKernel<LargestKernel>(isa, count, values + begin, &largest);
    finite = finite && largest < kFloatInfinity;
    const bool zeros = std::bit_cast<float>(largest) < kLeastScale;
    const float scale = zeros ? 0.0F : std::bit_cast<float>(largest);
    std::memcpy(encoded, &scale, sizeof(scale));
    encoded += sizeof(scale);
    if (zeros) {
      std::fill_n(codes, count, 0U);
      if (left != nullptr) std::copy_n(values + begin, count, left + begin);
    } else {
      RunKernel<CodesKernel>(isa, count, values + begin, scale, &codes[0], left == nullptr ? &unused[0] : left + begin);
    }
    for (size_t i = 0; i < count; i += 2) {
      *encoded++ = static_cast<uint8_t>(codes[i] | ((i + 1 < count ? codes[i + 1] : 0) << 4));
    }
  }
  return finite;
}

void DecodeE3m0(const uint8_t* encoded, size_t elements, float* values) {
  for (size_t begin = 0; begin < elements; begin += kE3m0Block) {
    const size_t count = std::min(kE3m0Block, elements - begin);
    float scale;
    std::memcpy(&scale, encoded, sizeof(scale));
    encoded += sizeof(scale);
    if (std::signbit(scale)) scale = std::numeric_limits<float>::infinity();
    float table[2 * kSign] = {scale * 0};
    for (uint32_t level = 1; level <= kLevels; ++level) {
      table[level] = scale * std::bit_cast<float>((127 - kLevels + level) << 23);  // 2^(level - 7).
      table[kSign | level] = -table[level];
    }
    table[kSign] = table[0];
    for (size_t i = 0; i < count; ++i) values[begin + i] = table[(encoded[i / 2] >> (i % 2 * 4)) & 0xFU];
    encoded += (count + 1) / 2;
  }
}

std::optional<size_t> E3m0Elements(size_t bytes) {
  const size_t rest = bytes % kBlockBytes;
  if (rest > 0 && rest <= sizeof(float)) return std::nullopt;
  return bytes / kBlockBytes * kE3m0Block + (rest == 0 ? 0 : 2 * (rest - sizeof(float)));
}

}  // namespace ps
