#include "worker/link/pulled_weights.h"

#include <algorithm>

namespace ps {

std::unique_ptr<PulledWeights::Use> PulledWeights::TakeUse(uint32_t shard) {
  MutexLock lock(mutex_);
  if (std::exchange(shards_[shard].used, true)) return nullptr;
  return std::make_unique<Use>(*this, shard, shards_[shard].held);
}

void PulledWeights::Release(uint32_t shard, const Held& held) {
  MutexLock lock(mutex_);
  shards_[shard] = {.used = false, .held = held};
}

void PulledWeights::Use::Write(const SliceInfo& slice, const Payload& payload, std::span<float> to) {
  held_.version.reset();
  float* const kept = weights_.memory_.tensors[slice.tensor].data() + slice.offset;
  if (const SparseValues* const changed = payload.sparse().get(); changed != nullptr) {
    for (size_t i = 0; i < changed->values.size(); ++i) kept[changed->positions[i]] = changed->values[i];
  } else if (!payload.absent()) {
    payload.CopyFloatsTo(kept);
  }
  std::copy_n(kept, slice.elements, to.data());
}

// Constants do not change: once they are there, they are of any version.
void PulledWeights::Use::Complete(uint64_t version, bool pull) {
  held_ = {.version = version, .constants = held_.constants || pull};
}

}  // namespace ps
