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
};

// The bytes that an element of this type takes.
constexpr size_t WireBytes(WireType type) { return type == WireType::kFloat32 ? 4 : 2; }

}  // namespace ps
