#include "worker/link/residuals.h"

#include <cstdlib>
#include <new>

namespace ps {

Residuals::Residuals(const SlicePlan& plan, bool velocities)
    : current_(plan.slices().size(), 0), next_step_(plan.num_shards(), 0) {
  size_t elements = 0;
  for (const SliceInfo& slice : plan.slices()) {
    offsets_.push_back(elements);
    sizes_.push_back(static_cast<size_t>(slice.elements));
    elements += (velocities ? 4 : 2) * sizes_.back();
  }
  // A page of zeros is taken when it is first touched, so slices that are sent as they are cost nothing.
  values_.reset(static_cast<float*>(std::calloc(elements, sizeof(float))));
  if (values_ == nullptr) throw std::bad_alloc();
}

void Residuals::Commit(uint32_t shard, uint64_t step, const std::vector<uint32_t>& slices) {
  if (step < next_step_[shard]) return;
  next_step_[shard] = step + 1;
  for (const uint32_t slice : slices) current_[slice] ^= 1;
}

void Residuals::Free::operator()(float* values) const { std::free(values); }

}  // namespace ps
