// How a job sends an element of a gradient or a weight.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ps {

// Numbers as in ps.proto. One that was received may be another.
enum class WireType : uint8_t {
  kFloat32 = 0,
  kBfloat16 = 1,  // The upper half of a float32.
  kFloat16 = 2,   // IEEE 754 binary16.
  kE3m0 = 3,      // Four bits, and a scale for each block: in pushes only.
};

inline constexpr size_t kE3m0Block = 256;  // The values that share a scale.

// The bytes that an element of this type takes, which is not kE3m0.
constexpr size_t WireBytes(WireType type) { return type == WireType::kFloat32 ? 4 : 2; }

// The bytes that so many elements of a slice take.
constexpr size_t WireBytes(WireType type, size_t elements) {
  if (type != WireType::kE3m0) return elements * WireBytes(type);
  return (elements + kE3m0Block - 1) / kE3m0Block * sizeof(float) + (elements + 1) / 2;
}

}  // namespace ps
