// Memory that a client hands out.
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/statusor.h"
#include "common/local/shared_memory.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// Plain memory for the tensors of a layout. RESOURCE_EXHAUSTED, naming the tensor, if there is not enough.
absl::StatusOr<TensorMemory> AllocateTensors(const Layout& layout);

// Memory for what a push carries, as it is sent: servers of this host may read it where it lies. Thread-safe, but for
// the tensors' values.
class SharedTensors {
 public:
  // Zeroed; weights are as such pushes carry them. RESOURCE_EXHAUSTED if there is not enough memory.
  static absl::StatusOr<std::shared_ptr<SharedTensors>> Create(const Layout& layout, const PushFormat& weights = {});

  // As Create, in memory of this process alone, which no server can be given. It begins with a page, too.
  static absl::StatusOr<std::shared_ptr<SharedTensors>> CreateOwn(const Layout& layout, const PushFormat& weights);

  // Empty where weights are not float32, all elements.
  const MutableTensors& tensors() const { return tensors_; }
  // Where each slice lies, and how.
  const ModelMemory& model() const { return model_; }
  std::span<uint8_t> bytes() const { return own_ == nullptr ? memory_.bytes() : std::span(own_.get(), model_.bytes()); }
  bool shared() const { return own_ == nullptr; }
  // If it is shared.
  const SharedMemory& memory() const { return memory_; }
  // Whether these are its tensors.
  bool Holds(const ConstTensors& tensors) const;

  // Servers may read what is here for ever. From now on it is not changed: what is written to the tensors stays here,
  // and no push can be made of it any more.
  void Detach();
  bool detached() const { return detached_; }

 private:
  SharedTensors(const Layout& layout, ModelMemory model, SharedMemory memory, std::shared_ptr<uint8_t> own = nullptr);

  const ModelMemory model_;
  SharedMemory memory_;
  const std::shared_ptr<uint8_t> own_;  // It takes the place of `memory_` where that is not shared.
  MutableTensors tensors_;
  std::atomic<bool> detached_ = false;
};

}  // namespace ps
