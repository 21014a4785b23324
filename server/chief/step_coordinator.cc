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

std::vector<StepSet> StepCoordinator::OnView(const Membership& members) {
  if (!mode_->counts_for_any_owner()) {
    std::erase_if(partial_, [&](const auto& entry) {
      return members.Find(entry.first.second, entry.second.incarnation) == nullptr;
    });
    std::erase_if(complete_, [&](const auto& entry) {
      const auto [step, rank] = entry.first;
      if (members.Find(rank, entry.second) != nullptr) return false;
      mode_->Dropped(rank, step);
      return true;
    });
  }
  ModeMembers takes_part;
  for (const auto& [rank, member] : members.members()) {
    takes_part[rank] = {
        .incarnation = member.incarnation, .done = member.done, .counts_as_empty = member.counts_as_empty};
  }
  std::vector<StepSet> fixed = mode_->SetMembers(takes_part);
  return leads() ? Decide(std::move(fixed)) : std::vector<StepSet>();
}

StepCoordinator::Outcome StepCoordinator::Complete(uint32_t shard, uint64_t incarnation, const PushHeader& push,
                                                   const Membership& members) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  const Push key = {push.step, push.rank};
  Outcome outcome;
  if (!leads() || mode_->WasDecided(push.step) || complete_.contains(key)) return outcome;
  if (mode_->counts_for_any_owner()) {
    incarnation = 0;
  } else if (members.Find(push.rank, incarnation) == nullptr) {
    return outcome;  // The shard will drop it when it knows the view.
  }
  Partial& partial = partial_[key];
  partial.incarnation = incarnation;
  partial.shards.resize(num_shards_);
  outcome.news = !partial.shards[shard];
  if (!outcome.news) return outcome;
  partial.shards[shard] = true;
  if (++partial.count < num_shards_) return outcome;
  partial_.erase(key);
  complete_[key] = incarnation;
  outcome.decided = Decide(mode_->Complete(push));
  return outcome;
}

std::string StepCoordinator::Incomplete() const {
  if (partial_.empty()) return "";
  const auto& [push, partial] = *partial_.begin();
  std::vector<uint32_t> missing;
  for (uint32_t shard = 0; shard < num_shards_; ++shard) {
    if (!partial.shards[shard]) missing.push_back(shard);
  }
  return absl::StrCat("step ", push.first, ": the push of rank ", push.second, " is not complete on shard ",
                      absl::StrJoin(missing, ", "));
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
    Check(complete_.erase({decided.step, rank}) == 1, "every push of a decided set is complete on every shard");
  }
  const auto is_over = [this](const auto& entry) { return mode_->WasDecided(entry.first.first); };
  std::erase_if(complete_, is_over);
  std::erase_if(partial_, is_over);
}

}  // namespace ps
