// What was not sent of what this worker pushed, by element: what rounding took away, and elements that were not among
// the largest. Error feedback adds it to the next push. With momentum correction each element's velocity is kept, too.
// Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
// 2019; Lin et al., Deep Gradient Compression, 2018.
//
// A push reads what was left before and writes what it leaves beside that. Only where it counts, on the shard that has
// the slice, does the second take the place of the first: a push that was refused, or is sent again, changes nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/slices.h"

namespace ps {

// One push uses it at a time (TryUse). Thread-safe for slices that differ.
class Residuals {
 public:
  // Zeros. std::bad_alloc if there is no memory for twice the model, and twice again with velocities.
  Residuals(const SlicePlan& plan, bool velocities)
      : current_(plan.slices().size(), 0), next_step_(plan.num_shards(), 0) {
    size_t elements = 0;
    for (const SliceInfo& slice : plan.slices()) {
      offsets_.push_back(elements);
      sizes_.push_back(static_cast<size_t>(slice.elements));
      elements += (velocities ? 4 : 2) * sizes_.back();
    }
    // A page of zeros is taken when it is first touched, so slices that are sent as they are cost nothing.
    values_.reset(static_cast<float*>(std::calloc(elements, sizeof(float))), std::free);
    if (values_ == nullptr) throw std::bad_alloc();
  }

  // Begins a push's use of it. False: another push uses it.
  bool TryUse() { return !used_.exchange(true); }
  void EndUse() { used_ = false; }

  // What the pushes that count have left of this slice, and where one that may count writes what it leaves.
  const float* kept(uint32_t slice) const { return At(slice, current_[slice]); }
  float* next(uint32_t slice) { return At(slice, 1 - current_[slice]); }
  // These are the velocities', if there are any.
  const float* velocity(uint32_t slice) const { return At(slice, 2 + current_[slice]); }
  float* next_velocity(uint32_t slice) { return At(slice, 3 - current_[slice]); }
  // The push of this step counts on this shard: what it has written for these slices is kept. Once for a step: a
  // repeat of it, by an exchange that knows nothing of the first, is not what was applied.
  void Commit(uint32_t shard, uint64_t step, const std::vector<uint32_t>& slices) {
    if (step < next_step_[shard]) return;
    next_step_[shard] = step + 1;
    for (const uint32_t slice : slices) current_[slice] ^= 1;
  }

 private:
  float* At(uint32_t slice, int which) const {
    return values_.get() + offsets_[slice] + static_cast<size_t>(which) * sizes_[slice];
  }

  std::atomic<bool> used_ = false;
  std::vector<size_t> offsets_;      // By slice: where all that is kept of it begins.
  std::vector<size_t> sizes_;        // Elements.
  std::vector<uint8_t> current_;     // Which of the two is kept.
  std::vector<uint64_t> next_step_;  // By shard: one more than the last that was committed.
  std::shared_ptr<float> values_;
};

}  // namespace ps
