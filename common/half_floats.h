// Rounding floats to two bytes and widening them again: bfloat16, the upper half of a float32, and float16, IEEE 754
// binary16. To the nearest, of two that are as near to the one whose last bit is 0, as IEEE 754-2019, 4.3.1, says. All
// instruction sets give equal bits, whatever is done with subnormals. Memory need not be aligned.
#pragma once

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

}  // namespace ps
