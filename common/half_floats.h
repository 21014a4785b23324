// Rounding floats to two bytes and widening them again: bfloat16, the upper half of a float32, and float16, IEEE 754
// binary16. A float is rounded to the nearest value, and, where two are equally near, to the one whose last bit is 0,
// as IEEE 754-2019, 4.3.1, says. All instruction sets give equal bits, whatever is done with subnormals. Memory need
// not be aligned.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/simd.h"
#include "common/wire_type.h"

namespace ps {

// `type` is never kFloat32. All return whether every value was finite and, rounded, still is (float16 has nothing above
// 65504); where one is not, what was written for it is some value.
bool RoundHalf(const float* values, size_t elements, WireType type, uint8_t* rounded, Isa isa);

// Whether RoundHalf would say so.
bool AllFit(const float* values, size_t elements, WireType type, Isa isa);

// The same of values + residual, but where that is finite and too large, the largest number of its sign is written.
// `left` is what rounding took away of it; it may be `residual`. Returns whether all values fit and all sums are
// finite.
bool RoundHalfKeeping(const float* values, const float* residual, size_t elements, WireType type, uint8_t* rounded,
                      float* left, Isa isa);

// What widening would make of the rounded values. They may be `rounded`.
bool RoundThrough(const float* values, size_t elements, WireType type, float* rounded, Isa isa);

void WidenHalf(const uint8_t* rounded, size_t elements, WireType type, float* values, Isa isa);

// Whether all are finite.
bool AllFiniteHalf(const uint8_t* rounded, size_t elements, WireType type, Isa isa);

// One value of each format of two bytes, for kernels (simd.h): without branches, so that they are vectorised.

// `a` where the condition holds, else `b`. Of a conditional expression compilers make a jump around floating-point
// operations, which they do not vectorise.
[[gnu::always_inline]] inline uint32_t Choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0U - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

struct Bfloat16 {
  static constexpr uint32_t kExponent = 0x7F80;
  static constexpr uint32_t kTooLarge = 0x7F7F8000;  // The bits of the least magnitude that is rounded to infinity.

  PS_KERNEL uint32_t Round(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  }
  PS_KERNEL float Widen(uint32_t bits) { return std::bit_cast<float>(bits << 16); }
};

struct Float16 {
  static constexpr uint32_t kExponent = 0x7C00;
  static constexpr uint32_t kTooLarge = 0x477FF000;  // 65520.

  PS_KERNEL uint32_t Round(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = MagnitudeBits(value);
    // 112 less in the exponent, 13 bits fewer after the point.
    const uint32_t normal = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
    // Below 2^-14 the last bit is worth 2^-24, as it is of floats from 0.5 on: adding 0.5 rounds there.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
    const uint32_t finite = Choose(magnitude < (113U << 23), subnormal, normal);
    return Choose(magnitude >= kTooLarge, kExponent, finite) | ((bits >> 16) & 0x8000U);  // Infinity.
  }
  PS_KERNEL float Widen(uint32_t bits) {
    const uint32_t magnitude = (bits & 0x7FFFU) << 13;
    const uint32_t normal = magnitude + (112U << 23);
    // Computes 2^-14 and so much more, then takes 2^-14 away: no subnormal float is computed with.
    const float above = std::bit_cast<float>(magnitude + (113U << 23)) - std::bit_cast<float>(113U << 23);
    const uint32_t exponent = bits & kExponent;
    const uint32_t finite = Choose(exponent == 0, std::bit_cast<uint32_t>(above), normal);
    return std::bit_cast<float>(Choose(exponent == kExponent, magnitude + (224U << 23), finite) |
                                ((bits & 0x8000U) << 16));
  }
};

}  // namespace ps
