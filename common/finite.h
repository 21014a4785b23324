// Looking for NaN and infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/float_bits.h"
#include "common/simd.h"

namespace ps {

struct NotFiniteKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* values, uint32_t* found) {
    uint32_t bad = 0;
    for (size_t i = 0; i < elements; ++i) {
      float value;
      std::memcpy(&value, values + i * sizeof(value), sizeof(value));
      bad |= static_cast<uint32_t>(MagnitudeBits(value) >= kFloatInfinity);
    }
    *found = bad;
  }
};

// True if all of the floats at `values`, which need not be aligned, are finite.
inline bool AllFinite(const void* values, size_t elements, Isa isa) {
  uint32_t found = 0;
  RunKernel<NotFiniteKernel>(isa, elements, static_cast<const uint8_t*>(values), &found);
  return found == 0;
}

}  // namespace ps
