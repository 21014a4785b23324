#include "worker/client/shared_tensors.h"

#include <cstdlib>
#include <cstring>
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
  constexpr size_t kPage = 4096;  // A device may be told to copy there.
  const size_t bytes = (model.bytes() + kPage - 1) / kPage * kPage;
  OwnMemory own(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)));
  if (own == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for the ", bytes, " bytes of a push"));
  }
  std::memset(own.get(), 0, bytes);
  return std::shared_ptr<SharedTensors>(new SharedTensors(layout, std::move(model), SharedMemory(), std::move(own)));
}

void SharedTensors::Free::operator()(uint8_t* bytes) const { std::free(bytes); }

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
