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
#include <memory>
#include <vector>

#include "common/slices.h"

namespace ps {

// One push uses it at a time (TryUse). Thread-safe for slices that differ.
class Residuals {
 public:
  // Zeros. std::bad_alloc if there is no memory for twice the model, and twice again with velocities.
  Residuals(const SlicePlan& plan, bool velocities);

  // Begins a push's use of it. False: another push uses it.
  bool TryUse() { return !used_.exchange(true); }
  void EndUse() { used_ = false; }

  // What the pushes that count have left of this slice, and where one that may count writes what it leaves.
  const float* kept(uint32_t slice) const { return At(slice, current_[slice]); }
  float* next(uint32_t slice) { return At(slice, 1 - current_[slice]); }
  // The same of velocities, if there are any.
  const float* velocity(uint32_t slice) const { return At(slice, 2 + current_[slice]); }
  float* next_velocity(uint32_t slice) { return At(slice, 3 - current_[slice]); }
  // The push of this step counts on this shard: what it has written for these slices is kept. Once for a step: a
  // repeat of it, by an exchange that knows nothing of the first, is not what was applied.
  void Commit(uint32_t shard, uint64_t step, const std::vector<uint32_t>& slices);

 private:
  float* At(uint32_t slice, int which) const {
    return values_.get() + offsets_[slice] + static_cast<size_t>(which) * sizes_[slice];
  }

  struct Free {
    void operator()(float* values) const;
  };
  std::atomic<bool> used_ = false;
  std::vector<size_t> offsets_;      // By slice: where all that is kept of it begins.
  std::vector<size_t> sizes_;        // Elements.
  std::vector<uint8_t> current_;     // Which of the two is kept.
  std::vector<uint64_t> next_step_;  // By shard: one more than the last that was committed.
  std::unique_ptr<float[], Free> values_;
};

}  // namespace ps
