// How floats are sent: in four bytes, rounded to two, or in four bits; all of them, or the largest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

#include "absl/strings/string_view.h"
#include "common/slices.h"
#include "ps/tensor.h"
#include "ps/wire_type.h"

namespace ps {

constexpr absl::string_view ToString(WireType type) {
  constexpr absl::string_view kNames[] = {"float32", "bfloat16", "float16", "e3m0"};
  const auto number = static_cast<size_t>(type);
  return number < std::size(kNames) ? kNames[number] : "of an unknown type";
}

constexpr std::optional<WireType> ParseWireType(absl::string_view name) {
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16, WireType::kFloat16, WireType::kE3m0}) {
    if (name == ToString(type)) return type;
  }
  return std::nullopt;
}

// What pushes carry of weights.
struct PushFormat {
  WireType type = WireType::kFloat32;
  uint32_t top_k = 0;  // Unless 0: how many elements of a full slice, the largest.

  // Slices of so many elements are sent whole, whatever top_k is.
  static constexpr int64_t kWholeElements = 1024;

  // How many elements of a slice of so many are sent.
  int64_t Sent(int64_t elements) const {
    if (top_k == 0 || elements <= kWholeElements) return elements;
    return std::min(elements, (top_k * elements + kSliceElements - 1) / kSliceElements);
  }
  // The bytes that a slice of so many elements takes: its positions, where not all are sent, and its values.
  size_t Bytes(int64_t elements) const {
    const int64_t sent = Sent(elements);
    const size_t positions = sent < elements ? static_cast<size_t>(sent) * sizeof(uint16_t) : 0;
    return positions + WireBytes(type, static_cast<size_t>(sent));
  }
  bool is_float32() const { return type == WireType::kFloat32 && top_k == 0; }
};

// What a job sends: what pushes carry of weights, and weights in replies. Everything else is float32.
struct WireFormat {
  PushFormat pushes;
  WireType weights = WireType::kFloat32;
  bool error_feedback = false;  // This and the next two mean what they mean in JoinReply.
  float error_feedback_decay = 1;
  float momentum_correction = 0;  // It needs top_k.
  bool weights_delta = false;     // Servers send what has changed of weights.

  // Pushes carry each gradient rounded to two bytes, and nothing is kept of what they do not carry.
  bool only_rounds() const {
    const bool halves = pushes.type == WireType::kBfloat16 || pushes.type == WireType::kFloat16;
    return halves && pushes.top_k == 0 && !error_feedback;
  }
};

// How the elements of a tensor of this kind are sent: as `type`, or in pushes as `format`, if they are weights, and
// else as float32.
constexpr WireType WireTypeOf(TensorKind kind, WireType type) {
  return kind == TensorKind::kWeight ? type : WireType::kFloat32;
}
constexpr PushFormat PushFormatOf(TensorKind kind, const PushFormat& format) {
  return kind == TensorKind::kWeight ? format : PushFormat();
}

}  // namespace ps
