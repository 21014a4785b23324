// Memory for what a push carries, as it is sent: servers of this host may read it where it lies.
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/statusor.h"
#include "common/local/model_memory.h"
#include "common/local/shared_memory.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// Thread-safe, but for the tensors' values.
class SharedTensors {
 public:
  // Zeroed; weights are as such pushes carry them. RESOURCE_EXHAUSTED if there is not enough memory.
  static absl::StatusOr<std::shared_ptr<SharedTensors>> Create(const Layout& layout, const PushFormat& weights = {});

  // Empty where weights are not float32, all elements.
  const MutableTensors& tensors() const { return tensors_; }
  // Where each slice lies, and how.
  const ModelMemory& model() const { return model_; }
  const SharedMemory& memory() const { return memory_; }
  // Whether these are its tensors.
  bool Holds(const ConstTensors& tensors) const;

  // Servers may read what is here for ever. From now on it is not changed: what is written to the tensors stays here,
  // and no push can be made of it any more.
  void Detach();
  bool detached() const { return detached_; }

 private:
  SharedTensors(const Layout& layout, ModelMemory model, SharedMemory memory);

  const ModelMemory model_;
  SharedMemory memory_;
  MutableTensors tensors_;
  std::atomic<bool> detached_ = false;
};

}  // namespace ps
