#include "server/modes/gather.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {

std::vector<StepSet> Gather::SetMembers(const ModeMembers& members) {
  for (const auto& [rank, member] : members_) {
    if (!member.done && !members.contains(rank)) lost_ranks_.insert(rank);
  }
  for (const auto& [rank, member] : members) {
    lost_ranks_.erase(rank);
    if (member.counts_as_empty) {
      empty_ranks_.insert(rank);
    } else {
      empty_ranks_.erase(rank);  // It has a new owner.
    }
  }
  members_ = members;
  return Fixed();
}

std::vector<StepSet> Gather::Complete(const PushHeader& push) {
  if (push.step != step_ || push.rank >= num_workers_ || HasArrived(push.rank)) return {};
  arrived_.push_back({.rank = push.rank, .empty = push.samples == 0});
  return Fixed();
}

void Gather::Dropped(uint32_t rank, uint64_t step) {
  if (step == step_) std::erase_if(arrived_, [&](const Arrival& arrival) { return arrival.rank == rank; });
}

void Gather::Decided(const StepSet& set) {
  step_ = set.step + 1;
  arrived_.clear();
}

std::vector<StepSet> Gather::Fixed() const {
  std::optional<std::vector<uint32_t>> ranks = Decide();
  if (!ranks.has_value()) return {};
  std::sort(ranks->begin(), ranks->end());
  return {{.step = step_, .ranks = *std::move(ranks)}};
}

bool Gather::HasArrived(uint32_t rank) const {
  return std::any_of(arrived_.begin(), arrived_.end(), [&](const Arrival& arrival) { return arrival.rank == rank; });
}

std::optional<uint32_t> Gather::NeedsDone(const std::set<uint32_t>& begun, const std::set<uint32_t>& done) const {
  if (begun.empty()) return {};
  for (const uint32_t rank : done) {
    if (rank < num_workers_ && !begun.contains(rank) && !empty_ranks_.contains(rank)) return rank;
  }
  return {};
}

nlohmann::ordered_json Gather::Save() const { return {{"mode", name()}, {"step", step_}}; }

absl::Status Gather::Load(const nlohmann::ordered_json& state) {
  const absl::StatusOr<uint64_t> step = SavedNumber(state, name(), "step");
  if (!step.ok()) return step.status();
  step_ = *step;
  arrived_.clear();
  return absl::OkStatus();
}

v1::ModePolicy Barrier::policy() const {
  v1::ModePolicy policy;
  policy.set_empty_contributions(true);
  policy.set_exact_versions(true);
  return policy;
}

Admission Barrier::Admit(const PushHeader& push, uint64_t /*expected*/) const {
  if (push.step == step()) return {};
  return {.kind = Admission::Kind::kReject,
          .why = absl::OutOfRangeError(
              absl::StrCat("rank ", push.rank, ", step ", push.step, ": the job's current step is ", step()))};
}

std::vector<uint32_t> Barrier::WaitsFor() const {
  std::vector<uint32_t> missing;
  for (const uint32_t rank : ExpectedContributors()) {
    if (!HasArrived(rank)) missing.push_back(rank);
  }
  return missing;
}

std::vector<uint32_t> Barrier::ExpectedContributors() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < num_workers(); ++rank) {
    const bool left_out = OnLoss() == LossAction::kContinue && !members().contains(rank);
    if ((!empty_ranks().contains(rank) && !left_out) || HasArrived(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::optional<std::vector<uint32_t>> Barrier::Decide() const {
  if (arrived().empty() || !WaitsFor().empty()) return std::nullopt;
  return ExpectedContributors();
}

}  // namespace ps
