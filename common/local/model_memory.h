// Where a model's tensors lie in one piece of shared memory: in the order of the layout, each beginning at a multiple
// of 64 bytes. So a slice is named by its number alone.
#pragma once

#include <cstddef>
#include <vector>

#include "common/slices.h"
#include "ps/tensor.h"

namespace ps {

// Constant.
class ModelMemory {
 public:
  explicit ModelMemory(const Layout& layout) {
    constexpr size_t kAlignment = 64;
    tensors_.reserve(layout.size());
    for (const TensorSpec& tensor : layout) {
      tensors_.push_back(bytes_);
      const size_t bytes = static_cast<size_t>(tensor.elements()) * sizeof(float);
      bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }

  size_t bytes() const { return bytes_; }
  // Bytes from the beginning.
  size_t tensor(size_t index) const { return tensors_[index]; }
  size_t slice(const SliceInfo& slice) const {
    return tensors_[slice.tensor] + static_cast<size_t>(slice.offset) * sizeof(float);
  }

 private:
  std::vector<size_t> tensors_;
  size_t bytes_ = 0;
};

}  // namespace ps
