#include "server/shard/shard_cut.h"

#include <algorithm>
#include <utility>

namespace ps {

void ShardCut::Freeze(uint64_t number, std::chrono::nanoseconds hold, TimePoint now) {
  number_ = number;
  frozen_at_ = now;
  frozen_until_ = now + hold;
  up_to_.reset();
  reached_ = false;
}

std::vector<ShardCut::Push> ShardCut::Advance(uint64_t number, CutSteps up_to) {
  if (!frozen() || number != number_) return {};
  up_to_ = std::move(up_to);
  first_behind_ = 0;
  const auto beyond =
      std::stable_partition(held_.begin(), held_.end(), [&](const Push& push) { return !Beyond(push); });
  std::vector<Push> released(held_.begin(), beyond);
  held_.erase(held_.begin(), beyond);
  return released;
}

std::vector<ShardCut::Push> ShardCut::End() {
  frozen_until_.reset();
  up_to_.reset();
  std::vector<Push> released(held_.begin(), held_.end());
  held_.clear();
  return released;
}

bool ShardCut::Beyond(const Push& push) const {
  if (!up_to_.has_value()) return true;
  const auto limit = up_to_->find(push.rank);
  return limit == up_to_->end() || limit->second.incarnation != push.incarnation ||
         push.step >= limit->second.next_step;
}

bool ShardCut::Hold(const Push& push) {
  if (!frozen() || !Beyond(push)) return false;
  held_.push_back(push);
  return true;
}

bool ShardCut::Reached(const AppliedFunction& applied, const OwnsFunction& owns) {
  if (!frozen() || !up_to_.has_value() || reached_) return false;
  for (auto each = up_to_->lower_bound(first_behind_); each != up_to_->end(); ++each) {
    const auto& [rank, step] = *each;
    first_behind_ = rank;
    if (applied(rank) < step && owns(rank, step.incarnation)) return false;
  }
  reached_ = true;
  return true;
}

}  // namespace ps
