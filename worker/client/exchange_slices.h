// What an exchange keeps of its slices: which may be sent, and which have arrived. Not thread-safe: used under the
// exchange's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "common/slices.h"

namespace ps {

// The slices of each tensor of a plan, ascending.
std::vector<std::vector<uint32_t>> SlicesOfTensors(const SlicePlan& plan);

// Slices that may be sent, in the order in which they became ready. A call that is made again sends them all again.
class ReadySlices {
 public:
  explicit ReadySlices(size_t tensors) : begun_(tensors) {}

  // This tensor's slices follow. False if there is no such tensor, or it was begun before.
  bool BeginTensor(size_t tensor);
  void Add(uint32_t slice) { slices_.push_back(slice); }
  // All slices of a tensor that was begun were added.
  void EndTensor() { ++ended_; }
  // There is nothing to add.
  void EndAll() { ended_ = begun_.size(); }

  bool all() const { return ended_ == begun_.size(); }
  // Those of one shard.
  std::vector<uint32_t> OfShard(const SlicePlan& plan, uint32_t shard) const;

 private:
  std::vector<bool> begun_;  // By tensor.
  size_t ended_ = 0;         // Tensors.
  std::vector<uint32_t> slices_;
};

// Slices that have arrived for good: another attempt would bring the same, and they may already be computed on.
class ArrivedSlices {
 public:
  explicit ArrivedSlices(const SlicePlan& plan);

  bool Has(uint32_t slice) const { return arrived_[slice]; }
  bool HasTensor(size_t tensor) const { return missing_[tensor] == 0; }
  // A slice that had not. Returns whether it was the last of its tensor.
  bool Add(uint32_t slice);

 private:
  const SlicePlan& plan_;
  std::vector<bool> arrived_;
  std::vector<size_t> missing_;  // By tensor.
};

}  // namespace ps
