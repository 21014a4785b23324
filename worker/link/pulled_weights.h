// The weights that this client pulled last, shard by shard, and of which versions: so that a server need send no more
// than what has changed since (--weights_delta). The caller's memory may have been written to meanwhile; this was not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/payload.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/client.h"

namespace ps {

// Thread-safe.
class PulledWeights {
 public:
  // `memory` is of the layout.
  PulledWeights(uint32_t shards, TensorMemory memory) : memory_(std::move(memory)), shards_(shards) {}

  // What there is of a shard.
  struct Held {
    std::optional<uint64_t> version;  // The version of its slices; unset: they are of several, or of none.
    bool constants = false;           // They are there, too.
  };
  // One call's part, which has a shard for itself. It must not outlive the weights.
  class Use {
   public:
    Use(PulledWeights& weights, uint32_t shard, const Held& held) : weights_(weights), shard_(shard), held_(held) {}
    ~Use() { weights_.Release(shard_, held_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // What is here, whole: the base that the server is told.
    std::optional<uint64_t> version() const { return held_.constants ? held_.version : std::nullopt; }
    // Takes a slice of the shard, or what has changed of it (absent: nothing), and copies it to `to`, whole.
    void Write(const SliceInfo& slice, const Payload& payload, std::span<float> to) {
      held_.version.reset();
      float* const kept = weights_.memory_.tensors[slice.tensor].data() + slice.offset;
      if (const SparseValues* const changed = payload.sparse().get(); changed != nullptr) {
        for (size_t i = 0; i < changed->values.size(); ++i) kept[changed->positions[i]] = changed->values[i];
      } else if (!payload.absent()) {
        payload.CopyFloatsTo(kept);
      }
      std::copy_n(kept, slice.elements, to.data());
    }
    // All slices of the shard have been written, but for constants if it was no `pull`: they are of this version.
    // Without it, what was written to is of none. Constants do not change: once they are there, they are of any
    // version.
    void Complete(uint64_t version, bool pull) { held_ = {.version = version, .constants = held_.constants || pull}; }

   private:
    PulledWeights& weights_;
    const uint32_t shard_;
    Held held_;
  };
  // Null: another call of the shard has it.
  std::unique_ptr<Use> TakeUse(uint32_t shard) {
    MutexLock lock(mutex_);
    if (std::exchange(shards_[shard].used, true)) return nullptr;
    return std::make_unique<Use>(*this, shard, shards_[shard].held);
  }

 private:
  struct Shard {
    bool used = false;
    Held held;
  };
  void Release(uint32_t shard, const Held& held) {
    MutexLock lock(mutex_);
    shards_[shard] = {.used = false, .held = held};
  }

  const TensorMemory memory_;
  Mutex mutex_;
  std::vector<Shard> shards_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
