#include "worker/client/shared_tensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ps {

absl::StatusOr<std::shared_ptr<SharedTensors>> SharedTensors::Create(const Layout& layout, const PushFormat& weights) {
  ModelMemory model(layout, weights);
  absl::StatusOr<SharedMemory> memory = SharedMemory::Create("gradients", model.bytes(), SharedMemory::Access::kRead);
  if (!memory.ok()) return memory.status();
  return std::shared_ptr<SharedTensors>(new SharedTensors(layout, std::move(model), *std::move(memory)));
}

absl::StatusOr<std::shared_ptr<SharedTensors>> SharedTensors::CreateOwn(const Layout& layout,
                                                                        const PushFormat& weights) {
  ModelMemory model(layout, weights);
  const size_t bytes = std::max<size_t>(model.bytes(), 1);
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for the ", bytes, " bytes of a push"));
  }
  OwnMemory own(static_cast<uint8_t*>(mapped), UnmapMemory{bytes});
  return std::shared_ptr<SharedTensors>(new SharedTensors(layout, std::move(model), SharedMemory(), std::move(own)));
}

void UnmapMemory::operator()(uint8_t* memory) const { munmap(memory, bytes); }

SharedTensors::SharedTensors(const Layout& layout, ModelMemory model, SharedMemory memory, OwnMemory own)
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
