#include "server/modes/gather.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "server/base/first_of.h"

namespace ps {

Gather::Gather(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy, Needs needs)
    : Mode(options, num_workers, std::move(policy)), needs_(needs), ranks_(num_workers) {
  CountNeeded();
}

std::vector<StepSet> Gather::SetMembers(const ModeMembers& members) {
  for (uint32_t number = 0; number < ranks_.size(); ++number) {
    Rank& rank = ranks_[number];
    const auto member = members.find(number);
    rank.member = member != members.end();
    if (!rank.member) continue;
    rank.state = member->second.counts_as_empty ? Rank::State::kEmpty
                 : member->second.done          ? Rank::State::kDone
                                                : Rank::State::kWorks;
  }
  CountNeeded();
  return Fixed();
}

void Gather::CountNeeded() {
  done_ = missing_ = 0;
  const LossAction on_loss = options().loss_action();
  for (Rank& rank : ranks_) {
    rank.needed = needs_(rank, on_loss);
    if (rank.needed && !rank.arrived) ++missing_;
    if (rank.state == Rank::State::kDone) ++done_;
  }
}

std::vector<StepSet> Gather::Complete(const PushHeader& push) {
  if (push.step != step_ || push.rank >= ranks_.size() || ranks_[push.rank].arrived) return {};
  (push.samples == 0 ? arrived_empty_ : arrived_).push_back(push.rank);
  SetArrived(push.rank, true);
  return Fixed();
}

void Gather::Dropped(uint32_t rank, uint64_t step) {
  if (step != step_ || rank >= ranks_.size() || !ranks_[rank].arrived) return;
  for (std::vector<uint32_t>* arrived : {&arrived_, &arrived_empty_}) std::erase(*arrived, rank);
  SetArrived(rank, false);
}

void Gather::SetArrived(uint32_t rank, bool arrived) {
  ranks_[rank].arrived = arrived;
  if (ranks_[rank].needed) arrived ? --missing_ : ++missing_;
}

void Gather::BeginStep(uint64_t step) {
  step_ = step;
  for (std::vector<uint32_t>* arrived : {&arrived_, &arrived_empty_}) {
    for (const uint32_t rank : *arrived) SetArrived(rank, false);
    arrived->clear();
  }
}

std::vector<StepSet> Gather::Fixed() const {
  std::optional<std::vector<uint32_t>> ranks = Decide();
  if (!ranks.has_value()) return {};
  std::sort(ranks->begin(), ranks->end());
  return {{.step = step_, .ranks = *std::move(ranks)}};
}

std::vector<uint32_t> Gather::WaitsFor() const {
  return NumbersWhere(ranks_.size(), [this](uint32_t rank) { return ranks_[rank].needed && !ranks_[rank].arrived; });
}

std::optional<uint32_t> Gather::NeedsDone(const std::set<uint32_t>& begun) const {
  if (begun.empty() || done_ == 0) return {};
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].state == Rank::State::kDone && !begun.contains(rank)) return rank;
  }
  return {};
}

absl::Status Gather::Load(const nlohmann::ordered_json& state) {
  PS_ASSIGN_OR_RETURN(const uint64_t step, SavedNumber(state, name(), "step"));
  BeginStep(step);
  return absl::OkStatus();
}

Barrier::Barrier(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy)
    : Gather(options, num_workers, std::move(policy), [](const Rank& rank, LossAction on_loss) {
        return rank.state != Rank::State::kEmpty && (rank.member || on_loss != LossAction::kContinue);
      }) {}

v1::ModePolicy Barrier::Policy() {
  v1::ModePolicy policy;
  policy.set_empty_contributions(true);
  policy.set_exact_versions(true);
  return policy;
}

std::vector<uint32_t> Barrier::ExpectedContributors() const {
  return NumbersWhere(ranks().size(), [this](uint32_t rank) { return ranks()[rank].needed || ranks()[rank].arrived; });
}

std::optional<std::vector<uint32_t>> Barrier::Decide() const {
  if (missing() > 0 || expected() == 0) return std::nullopt;
  return ExpectedContributors();
}

}  // namespace ps
