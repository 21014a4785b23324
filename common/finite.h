// Looking for NaN and infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace ps {

// A float is infinite or not a number if all bits of its exponent are set (IEEE 754).
struct NotFiniteKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* values, uint32_t* found) {
    uint32_t bad = 0;
    for (size_t i = 0; i < elements; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i * sizeof(bits), sizeof(bits));
      bad |= static_cast<uint32_t>((bits & 0x7F800000U) == 0x7F800000U);
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
