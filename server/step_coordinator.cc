#include "server/step_coordinator.h"

#include <algorithm>

#include "common/check.h"

namespace ps {

StepCoordinator::StepCoordinator(std::unique_ptr<Mode> mode, uint32_t num_shards)
    : mode_(std::move(mode)), num_shards_(num_shards) {}

StepCoordinator::Outcome StepCoordinator::Complete(uint32_t shard, uint32_t rank, uint64_t step) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  Outcome outcome;
  if (!leads() || mode_->WasDecided({.step = step, .ranks = {rank}})) return outcome;
  std::set<uint32_t>& have = complete_[{step, rank}];
  outcome.news = have.insert(shard).second;
  if (!outcome.news || have.size() < num_shards_) return outcome;
  outcome.decided = mode_->Complete(rank, step);
  for (const StepSet& set : outcome.decided) {
    const uint64_t before = mode_->step();
    mode_->Decided(set);
    Check(mode_->step() >= before, "steps only grow");
    Forget(set);
  }
  return outcome;
}

void StepCoordinator::Forget(const StepSet& decided) {
  Check(std::is_sorted(decided.ranks.begin(), decided.ranks.end()), "a set's ranks are ascending");
  for (const uint32_t rank : decided.ranks) {
    const auto push = complete_.find({decided.step, rank});
    Check(push != complete_.end() && push->second.size() == num_shards_,
          "every push of a decided set is complete on every shard");
    complete_.erase(push);
  }
  std::erase_if(complete_, [&](const auto& entry) {
    return mode_->WasDecided({.step = entry.first.first, .ranks = {entry.first.second}});
  });
}

}  // namespace ps
