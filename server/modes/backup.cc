#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/modes/gather.h"

namespace ps {
namespace {

// Synchronous with backup workers: of the L live ranks (and lost ones that are waited for) that are not known to be
// empty, the first max(1, L - b) complete pushes make the version. A later one is stale, and its worker goes on at the
// current step. Without a push that is not empty, a step of all live ranks changes nothing but the version. Source:
// Chen et al., Revisiting Distributed Synchronous SGD, 2016 (arXiv:1604.00981).
class Backup final : public Gather {
 public:
  using Gather::Gather;

  v1::ModePolicy policy() const override {
    v1::ModePolicy policy;
    policy.set_empty_contributions(true);
    return policy;
  }
  bool counts_for_any_owner() const override { return false; }

  Admission Admit(const PushHeader& push, uint64_t /*expected*/) const override {
    if (push.step == step()) return {};
    if (push.step < step()) return {.kind = Admission::Kind::kStale};
    return {.kind = Admission::Kind::kReject,
            .why = absl::OutOfRangeError(
                absl::StrCat("rank ", push.rank, ", step ", push.step, ": the job's current step is ", step()))};
  }

  std::vector<uint32_t> WaitsFor() const override {
    std::vector<uint32_t> missing;
    for (const auto& [rank, member] : members()) {
      if (!member.done && !HasArrived(rank)) missing.push_back(rank);
    }
    if (OnLoss() == LossAction::kWait) missing.insert(missing.end(), lost_ranks().begin(), lost_ranks().end());
    std::sort(missing.begin(), missing.end());
    return missing;
  }

  // Who is first is known when they are there.
  std::vector<uint32_t> ExpectedContributors() const override { return {}; }

  // A worker that is done is not waited for.
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>&, const std::set<uint32_t>&) const override { return {}; }

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override {
    if (arrived().empty()) return std::nullopt;
    std::vector<uint32_t> ranks, empty;
    for (const Arrival& arrival : arrived()) (arrival.empty ? empty : ranks).push_back(arrival.rank);
    const size_t not_empty = ranks.size() + WaitsFor().size();  // As far as is known.
    if (not_empty > 0) {
      const size_t b = options().backup_workers;
      const size_t needed = not_empty > b ? not_empty - b : 1;
      if (ranks.size() < needed) return std::nullopt;
      ranks.resize(needed);
    }
    ranks.insert(ranks.end(), empty.begin(), empty.end());
    return ranks;
  }
};

}  // namespace

std::unique_ptr<Mode> MakeBackup(const ModeOptions& options, uint32_t num_workers) {
  return std::make_unique<Backup>(options, num_workers);
}

}  // namespace ps
