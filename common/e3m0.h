// Floats in four bits: a sign and a level of three bits, beside a scale for each block. A level is a power of two times
// the scale, so a value is off by at most 41 %, unless it is so small that it becomes 0. Source: the outer gradients in
// E3M0 of Douillard et al., Streaming DiLoCo, 2025 (arXiv:2501.18512); ps.proto (WIRE_E3M0) says what is sent.
//
// A block is kE3m0Block consecutive values, the last one fewer: its scale, a float32, and then its codes, two in a
// byte, the first in the lower half. Memory need not be aligned. All instruction sets give equal bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/simd.h"

namespace ps {

// Encodes so many values to WireBytes(kE3m0, elements) bytes. Where `left` is not null, values less what decoding makes
// of them is written there, exactly; it may be `values`. Returns whether all values are finite; where one is not, what
// was written is no use.
bool EncodeE3m0(const float* values, size_t elements, uint8_t* encoded, float* left, Isa isa);

// What was encoded. A scale that is not finite, or whose sign bit is set, makes values that are not finite of all codes
// of its block, so that whoever looks for those finds it.
void DecodeE3m0(const uint8_t* encoded, size_t elements, float* values);

// How many elements so many bytes are; of an odd number one more, since two share a byte. Nothing: they are no whole
// blocks.
std::optional<size_t> E3m0Elements(size_t bytes);

}  // namespace ps
