#include "worker/link/tensor_memory.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "common/status.h"

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
    if (block == nullptr) return ResourceExhausted("no memory for the ", bytes, " bytes of tensor ", ToString(tensor));
    std::memset(block, 0, bytes);
    blocks->emplace_back(block, std::free);
    memory.tensors.emplace_back(static_cast<float*>(block), elements);
  }
  memory.owner = std::move(blocks);
  return memory;
}

absl::StatusOr<std::shared_ptr<SharedTensors>> SharedTensors::Create(const Layout& layout, const PushFormat& weights) {
  ModelMemory model(layout, weights);
  PS_ASSIGN_OR_RETURN(SharedMemory memory,
                      SharedMemory::Create("gradients", model.bytes(), SharedMemory::Access::kRead));
  return std::shared_ptr<SharedTensors>(new SharedTensors(layout, std::move(model), std::move(memory)));
}

absl::StatusOr<std::shared_ptr<SharedTensors>> SharedTensors::CreateOwn(const Layout& layout,
                                                                        const PushFormat& weights) {
  ModelMemory model(layout, weights);
  const size_t bytes = std::max<size_t>(model.bytes(), 1);
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return ResourceExhausted("no memory for the ", bytes, " bytes of a push");
  std::shared_ptr<uint8_t> own(static_cast<uint8_t*>(mapped), [bytes](uint8_t* memory) { munmap(memory, bytes); });
  return std::shared_ptr<SharedTensors>(new SharedTensors(layout, std::move(model), SharedMemory(), std::move(own)));
}

SharedTensors::SharedTensors(const Layout& layout, ModelMemory model, SharedMemory memory, std::shared_ptr<uint8_t> own)
    : model_(std::move(model)), memory_(std::move(memory)), own_(std::move(own)) {
  if (!model_.weights().is_float32()) return;
  for (size_t i = 0; i < layout.size(); ++i) {
    auto* const values = reinterpret_cast<float*>(bytes().data() + model_.tensor(i));
    tensors_.emplace_back(values, static_cast<size_t>(layout[i].elements()));
  }
}

bool SharedTensors::Holds(const ConstTensors& tensors) const {
  if (tensors.size() != tensors_.size()) return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].data() != tensors_[i].data() || tensors[i].size() != tensors_[i].size()) return false;
  }
  return true;
}

void SharedTensors::Detach() {
  if (!detached_.exchange(true) && shared()) memory_.MakePrivate();
}

}  // namespace ps
