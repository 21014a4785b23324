// Where a model's tensors lie in one piece of shared memory: in the order of the layout, each beginning at a multiple
// of 64 bytes. So a slice is named by its number alone. Of weights it is as pushes carry them (wire_type.h): elements
// of two bytes, perhaps; where only the largest are sent, a slice is their positions and then their values.
#pragma once

#include <cstddef>
#include <vector>

#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/tensor.h"

namespace ps {

// Constant.
class ModelMemory {
 public:
  explicit ModelMemory(const Layout& layout, const PushFormat& weights = {}) : weights_(weights) {
    constexpr size_t kAlignment = 64;
    tensors_.reserve(layout.size());
    for (const TensorSpec& tensor : layout) {
      tensors_.push_back({.begin = bytes_, .format = PushFormatOf(tensor.kind, weights)});
      const int64_t whole = tensor.elements() / kSliceElements;
      const size_t bytes = static_cast<size_t>(whole) * BytesOf(tensors_.back().format, kSliceElements) +
                           BytesOf(tensors_.back().format, tensor.elements() % kSliceElements);
      bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }

  const PushFormat& weights() const { return weights_; }
  size_t bytes() const { return bytes_; }
  // Bytes from the beginning.
  size_t tensor(size_t index) const { return tensors_[index].begin; }

  // Where a slice is: `positions` bytes, and then the values.
  struct Place {
    size_t begin = 0;
    size_t positions = 0;
    size_t values = 0;
    WireType type = WireType::kFloat32;

    bool sparse() const { return positions > 0; }
  };
  Place slice(const SliceInfo& slice) const {
    const Tensor& tensor = tensors_[slice.tensor];
    const auto before = static_cast<size_t>(slice.offset / kSliceElements);
    const auto sent = static_cast<size_t>(tensor.format.Sent(slice.elements));
    return {.begin = tensor.begin + before * BytesOf(tensor.format, kSliceElements),
            .positions = tensor.format.Sent(slice.elements) < slice.elements ? sent * sizeof(uint16_t) : 0,
            .values = sent * WireBytes(tensor.format.type),
            .type = tensor.format.type};
  }

 private:
  struct Tensor {
    size_t begin;
    PushFormat format;
  };
  // Of a slice of so many elements.
  static size_t BytesOf(const PushFormat& format, int64_t elements) {
    const int64_t sent = format.Sent(elements);
    return static_cast<size_t>(sent) * (WireBytes(format.type) + (sent < elements ? sizeof(uint16_t) : 0));
  }

  const PushFormat weights_;
  std::vector<Tensor> tensors_;
  size_t bytes_ = 0;
};

}  // namespace ps
