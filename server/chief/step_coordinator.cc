#include "server/chief/step_coordinator.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "server/base/first_of.h"

namespace ps {

void StepCoordinator::Restore(uint64_t version) {
  if (!mode_->coordinated()) return;
  const absl::Status loaded = mode_->Load({{"mode", mode_->name()}, {"step", version}});
  Check(loaded.ok(), "a mode whose sets are named begins at any version");
}

std::vector<StepSet> StepCoordinator::OnView(const Membership& members, TimePoint now) {
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
  return leads() ? Decide(std::move(fixed), now) : std::vector<StepSet>();
}

StepCoordinator::Outcome StepCoordinator::Complete(uint32_t shard, uint64_t incarnation, const PushHeader& push,
                                                   const Membership& members) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  const Push key = {push.step, push.rank};
  Outcome outcome;
  if (!leads() || mode_->WasDecided(push.rank, push.step) || complete_.contains(key)) return outcome;
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
  partial.took = std::max(partial.took, push.took);
  if (++partial.count < num_shards_) return outcome;
  PushHeader complete = push;
  complete.took = partial.took;
  partial_.erase(key);
  complete_[key] = incarnation;
  outcome.decided = Decide(mode_->Complete(complete), push.at);
  return outcome;
}

std::vector<StepSet> StepCoordinator::SetIdle(const std::set<uint32_t>& ranks, TimePoint now) {
  if (!leads() || ranks == idle_) return {};
  idle_ = ranks;
  return Decide(mode_->SetIdle(ranks), now);
}

std::vector<StepSet> StepCoordinator::Tick(TimePoint now) {
  std::vector<StepSet> decided;
  if (!leads()) return decided;
  for (const Mode::Window& window : mode_->windows()) {
    const auto open = windows_.find(window.number);
    if (open == windows_.end() || now - open->second < window.length) continue;
    for (StepSet& set : Decide(mode_->WindowOver(window.number), now)) decided.push_back(std::move(set));
  }
  return decided;
}

std::vector<uint32_t> StepCoordinator::Missing() const {
  if (!leads() || (complete_.empty() && partial_.empty()) || mode_->Enough(complete_.size())) return {};
  std::set<uint32_t> complete = idle_;
  for (const auto& [push, incarnation] : complete_) complete.insert(push.second);
  std::set<uint32_t> begun = complete;
  for (const auto& [push, partial] : partial_) begun.insert(push.second);
  const std::vector<uint32_t> waits_for = mode_->WaitsFor();
  const auto without = [&](const std::set<uint32_t>& ranks) {
    std::vector<uint32_t> left;
    std::copy_if(waits_for.begin(), waits_for.end(), std::back_inserter(left),
                 [&](uint32_t rank) { return !ranks.contains(rank); });
    return left;
  };
  std::vector<uint32_t> missing = without(begun);
  // Where a shard has nobody's push it is the shard that is behind.
  return missing.empty() && !complete_.empty() ? without(complete) : missing;
}

std::string StepCoordinator::Incomplete() const {
  if (partial_.empty()) return "";
  const Push& push = partial_.begin()->first;
  const Partial& partial = partial_.begin()->second;
  const auto missing = NumbersWhere(num_shards_, [&](uint32_t shard) { return !partial.shards[shard]; });
  return absl::StrCat("step ", push.first, ": the push of rank ", push.second, " is not complete on shard ",
                      absl::StrJoin(missing, ", "));
}

std::vector<StepSet> StepCoordinator::Decide(std::vector<StepSet> sets, TimePoint now) {
  for (const StepSet& set : sets) {
    const uint64_t before = mode_->step();
    mode_->Decided(set);
    Check(mode_->step() >= before, "steps only grow");
    Forget(set);
  }
  std::map<uint64_t, TimePoint> open;
  for (const Mode::Window& window : mode_->windows()) {
    const auto known = windows_.find(window.number);
    open[window.number] = known == windows_.end() ? now : known->second;
  }
  windows_ = std::move(open);
  return sets;
}

void StepCoordinator::Forget(const StepSet& decided) {
  Check(std::is_sorted(decided.ranks.begin(), decided.ranks.end()), "a set's ranks are ascending");
  for (size_t i = 0; i < decided.ranks.size(); ++i) {
    Check(complete_.erase({decided.step_of(i), decided.ranks[i]}) == 1,
          "every push of a decided set is complete on every shard");
  }
  const auto is_over = [this](const auto& entry) { return mode_->WasDecided(entry.first.second, entry.first.first); };
  std::erase_if(complete_, is_over);
  std::erase_if(partial_, is_over);
}

}  // namespace ps
