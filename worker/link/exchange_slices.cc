#include "worker/link/exchange_slices.h"

#include "common/check.h"

namespace ps {

std::vector<std::vector<uint32_t>> SlicesOfTensors(const SlicePlan& plan) {
  std::vector<std::vector<uint32_t>> slices(plan.layout().size());
  for (const SliceInfo& slice : plan.slices()) slices[slice.tensor].push_back(slice.index);
  return slices;
}

ReadySlices::ReadySlices(const SlicePlan& plan, bool with_constants, const std::vector<bool>& carried)
    : plan_(plan), missing_slices_(plan.num_shards()), last_(plan.num_shards()) {
  expected_.reserve(plan.layout().size());
  for (size_t tensor = 0; tensor < plan.layout().size(); ++tensor) {
    const bool part = carried.empty() || carried[tensor];
    expected_.push_back(part && (with_constants || IsPushed(plan.layout()[tensor].kind)));
    if (expected_.back()) ++missing_tensors_;
  }
  for (const SliceInfo& slice : plan.slices()) {
    if (expected_[slice.tensor]) ++missing_slices_[slice.shard];
  }
}

bool ReadySlices::BeginTensor(size_t tensor) {
  if (tensor >= expected_.size() || !expected_[tensor]) return false;
  expected_[tensor] = false;
  return true;
}

void ReadySlices::Add(uint32_t slice) {
  const uint32_t shard = plan_.slices()[slice].shard;
  slices_.push_back(slice);
  if (--missing_slices_[shard] == 0) last_[shard] = slice;
}

std::vector<uint32_t> ReadySlices::OfShard(uint32_t shard) const {
  std::vector<uint32_t> slices;
  for (const uint32_t slice : slices_) {
    if (plan_.slices()[slice].shard == shard && (all() || last_[shard] != slice)) slices.push_back(slice);
  }
  return slices;
}

std::vector<uint32_t> ReadySlices::NewOfShard(uint32_t shard, std::span<const uint32_t> added) const {
  const std::optional<uint32_t> last = last_[shard];
  std::vector<uint32_t> fresh;
  for (const uint32_t slice : added) {
    if (plan_.slices()[slice].shard == shard && slice != last) fresh.push_back(slice);
  }
  if (all() && last.has_value()) fresh.push_back(*last);
  return fresh;
}

ArrivedSlices::ArrivedSlices(const SlicePlan& plan, bool with_constants, const std::vector<bool>& carried)
    : plan_(plan), arrived_(plan.slices().size()), missing_(plan.layout().size()) {
  for (const SliceInfo& slice : plan.slices()) {
    const bool part = carried.empty() || carried[slice.tensor];
    if (part && (with_constants || IsPushed(plan.layout()[slice.tensor].kind))) ++missing_[slice.tensor];
  }
}

bool ArrivedSlices::Add(uint32_t slice) {
  Check(!arrived_[slice], "a slice arrives for good once");
  arrived_[slice] = true;
  return --missing_[plan_.slices()[slice].tensor] == 0;
}

}  // namespace ps
