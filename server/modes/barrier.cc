#include "server/modes/barrier.h"

#include "absl/strings/str_cat.h"

namespace ps {

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
