#include "worker/client/exchange_slices.h"

#include "common/check.h"

namespace ps {

std::vector<std::vector<uint32_t>> SlicesOfTensors(const SlicePlan& plan) {
  std::vector<std::vector<uint32_t>> slices(plan.layout().size());
  for (const SliceInfo& slice : plan.slices()) slices[slice.tensor].push_back(slice.index);
  return slices;
}

bool ReadySlices::BeginTensor(size_t tensor) {
  if (tensor >= begun_.size() || begun_[tensor]) return false;
  begun_[tensor] = true;
  return true;
}

std::vector<uint32_t> ReadySlices::OfShard(const SlicePlan& plan, uint32_t shard) const {
  std::vector<uint32_t> slices;
  for (const uint32_t slice : slices_) {
    if (plan.slices()[slice].shard == shard) slices.push_back(slice);
  }
  return slices;
}

ArrivedSlices::ArrivedSlices(const SlicePlan& plan) : plan_(plan), arrived_(plan.slices().size()) {
  for (const auto& slices : SlicesOfTensors(plan)) missing_.push_back(slices.size());
}

bool ArrivedSlices::Add(uint32_t slice) {
  Check(!arrived_[slice], "a slice arrives for good once");
  arrived_[slice] = true;
  return --missing_[plan_.slices()[slice].tensor] == 0;
}

}  // namespace ps
