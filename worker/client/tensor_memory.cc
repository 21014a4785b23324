#include "worker/client/tensor_memory.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

constexpr size_t kAlignment = 64;  // A cache line, an AVX-512 vector.

}  // namespace

absl::StatusOr<TensorMemory> AllocateTensors(const Layout& layout) {
  TensorMemory memory;
  // A block each, not one for all: then a write past a tensor's end is one that the address sanitizer sees.
  auto blocks = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (const TensorSpec& tensor : layout) {
    const auto elements = static_cast<size_t>(tensor.elements());
    const size_t bytes = (elements * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    void* block = std::aligned_alloc(kAlignment, bytes);
    if (block == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for the ", bytes, " bytes of tensor ", ToString(tensor)));
    }
    std::memset(block, 0, bytes);
    blocks->emplace_back(block, std::free);
    memory.tensors.emplace_back(static_cast<float*>(block), elements);
  }
  memory.owner = std::move(blocks);
  return memory;
}

}  // namespace ps
