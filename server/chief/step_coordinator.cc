#include "server/chief/step_coordinator.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"

namespace ps {

StepCoordinator::StepCoordinator(std::unique_ptr<Mode> mode, uint32_t num_shards)
    : mode_(std::move(mode)), num_shards_(num_shards) {}

void StepCoordinator::Restore(uint64_t version) {
  if (!mode_->synchronous()) return;
  const absl::Status loaded = mode_->Load({{"mode", mode_->name()}, {"step", version}});
  Check(loaded.ok(), "a synchronous mode begins at any step");
}

std::vector<StepSet> StepCoordinator::SetMembers(const ModeMembers& members) {
  members_ = members;
  if (!mode_->counts_for_any_owner()) {
    std::erase_if(complete_, [&](const auto& entry) {
      const auto [step, rank] = entry.first;
      const auto owner = members.find(rank);
      if (owner != members.end() && owner->second.incarnation == entry.second.incarnation) return false;
      mode_->Dropped(rank, step);
      return true;
    });
  }
  std::vector<StepSet> fixed = mode_->SetMembers(members);
  return leads() ? Decide(std::move(fixed)) : std::vector<StepSet>();
}

StepCoordinator::Outcome StepCoordinator::Complete(uint32_t shard, uint64_t incarnation, const PushHeader& push) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  Outcome outcome;
  if (!leads() || mode_->WasDecided({.step = push.step, .ranks = {push.rank}})) return outcome;
  if (mode_->counts_for_any_owner()) {
    incarnation = 0;
  } else if (const auto owner = members_.find(push.rank);
             owner == members_.end() || owner->second.incarnation != incarnation) {
    return outcome;  // The shard will drop it when it knows the view.
  }
  Completion& completion = complete_[{push.step, push.rank}];
  completion.incarnation = incarnation;
  outcome.news = completion.shards.insert(shard).second;
  if (!outcome.news || completion.shards.size() < num_shards_) return outcome;
  outcome.decided = Decide(mode_->Complete(push));
  return outcome;
}

std::string StepCoordinator::Incomplete() const {
  for (const auto& [push, completion] : complete_) {
    std::vector<uint32_t> missing;
    for (uint32_t shard = 0; shard < num_shards_; ++shard) {
      if (!completion.shards.contains(shard)) missing.push_back(shard);
    }
    if (missing.empty()) continue;
    return absl::StrCat("step ", push.first, ": the push of rank ", push.second, " is not complete on shard ",
                        absl::StrJoin(missing, ", "));
  }
  return "";
}

std::vector<StepSet> StepCoordinator::Decide(std::vector<StepSet> sets) {
  for (const StepSet& set : sets) {
    const uint64_t before = mode_->step();
    mode_->Decided(set);
    Check(mode_->step() >= before, "steps only grow");
    Forget(set);
  }
  return sets;
}

void StepCoordinator::Forget(const StepSet& decided) {
  Check(std::is_sorted(decided.ranks.begin(), decided.ranks.end()), "a set's ranks are ascending");
  for (const uint32_t rank : decided.ranks) {
    const auto push = complete_.find({decided.step, rank});
    Check(push != complete_.end() && push->second.shards.size() == num_shards_,
          "every push of a decided set is complete on every shard");
    complete_.erase(push);
  }
  std::erase_if(complete_, [&](const auto& entry) {
    return mode_->WasDecided({.step = entry.first.first, .ranks = {entry.first.second}});
  });
}

}  // namespace ps
