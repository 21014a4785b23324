// What an exchange keeps of its slices: which may be sent, and which have arrived. Not thread-safe: used under the
// exchange's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/slices.h"

namespace ps {

// The slices of each tensor of a plan, ascending.
std::vector<std::vector<uint32_t>> SlicesOfTensors(const SlicePlan& plan);

// Slices that may be sent, in the order in which they became ready. A call that is made again sends them all again.
//
// The slice that completes a shard's is held back until all are ready: no shard has a whole push before that, so what
// is pushed may still be replaced, and no weights come that are made of it.
class ReadySlices {
 public:
  // The slices of a push, or, with those of constants, of initial values. The plan outlives it. `carried`: those of
  // these tensors alone; empty: of all.
  ReadySlices(const SlicePlan& plan, bool with_constants, const std::vector<bool>& carried = {});

  // This tensor's slices follow. False if there is no such tensor, it is not sent, or it was begun before.
  bool BeginTensor(size_t tensor);
  void Add(uint32_t slice);
  // All slices of a tensor that was begun were added.
  void EndTensor() { --missing_tensors_; }
  // There is nothing to add.
  void EndAll() { missing_tensors_ = 0; }

  bool all() const { return missing_tensors_ == 0; }
  // That were added.
  const std::vector<uint32_t>& slices() const { return slices_; }
  // Those of one shard that may be sent.
  std::vector<uint32_t> OfShard(uint32_t shard) const;
  // Those of one shard that may be sent now and could not before these were added last.
  std::vector<uint32_t> NewOfShard(uint32_t shard, std::span<const uint32_t> added) const;

 private:
  const SlicePlan& plan_;
  std::vector<bool> expected_;  // By tensor: it is to be begun.
  size_t missing_tensors_ = 0;  // That have not ended.
  std::vector<uint32_t> slices_;
  std::vector<size_t> missing_slices_;         // By shard.
  std::vector<std::optional<uint32_t>> last_;  // By shard: its last slice, once it is ready.
};

// Slices that have arrived for good: another attempt would bring the same, and they may already be computed on.
class ArrivedSlices {
 public:
  // The slices that a push_pull brings, or, with those of constants, a pull. `carried` as above.
  ArrivedSlices(const SlicePlan& plan, bool with_constants, const std::vector<bool>& carried = {});

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
