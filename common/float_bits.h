// A float32 as the 32 bits that it is stored in (IEEE 754).
#pragma once

#include <bit>
#include <cstdint>

namespace ps {

inline constexpr uint32_t kFloatInfinity = 0x7F800000U;  // Its exponent is all ones, as is that of NaN.

// All but the sign. They grow with the magnitude; those of infinity and NaN are at least kFloatInfinity.
[[gnu::always_inline]] inline uint32_t MagnitudeBits(float value) {
  return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU;
}

}  // namespace ps
