#include <algorithm>
#include <utility>

#include "server/modes/gather.h"

namespace ps {
namespace {

// Synchronous with backup workers: of the L live ranks (and lost ones that are waited for) that are not known to be
// empty, the first max(1, L - b) complete pushes make the version. A later one is stale, and its worker goes on at the
// current step. Without a push that is not empty, a step of all live ranks changes nothing but the version. Source:
// Chen et al., Revisiting Distributed Synchronous SGD, 2016 (arXiv:1604.00981).
class Backup final : public Gather {
 public:
  Backup(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy)
      : Gather(options, num_workers, std::move(policy), [](const Rank& rank, LossAction on_loss) {
          return rank.state == Rank::State::kWorks && (rank.member || on_loss == LossAction::kWait);
        }) {}

  bool counts_for_any_owner() const override { return false; }

  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    if (push.step < oldest().step) return {.kind = Admission::Kind::kStale};
    return Gather::Admit(push, expected);
  }

  Oldest oldest() const override { return {.step = step()}; }

  uint32_t usual_gradients() const override {
    const uint32_t usual = options().usual_workers, left_out = options().backup_workers;
    return usual > left_out ? usual - left_out : std::min(usual, 1U);
  }

  // Who is first is known when they are there.
  std::vector<uint32_t> ExpectedContributors() const override { return {}; }
  size_t expected() const override { return 0; }

  // A worker that is done is not waited for.
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& /*begun*/) const override { return {}; }

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override {
    if (arrived().empty() && arrived_empty().empty()) return std::nullopt;
    const size_t not_empty = arrived().size() + missing();  // More may turn out to be empty.
    const size_t b = options().backup_workers;
    const size_t needed = not_empty > b ? not_empty - b : std::min<size_t>(not_empty, 1);
    if (arrived().size() < needed) return std::nullopt;
    std::vector<uint32_t> ranks(arrived().begin(), arrived().begin() + static_cast<std::ptrdiff_t>(needed));
    ranks.insert(ranks.end(), arrived_empty().begin(), arrived_empty().end());
    return ranks;
  }
};

}  // namespace

std::unique_ptr<Mode> MakeBackup(const ModeOptions& options, uint32_t num_workers) {
  v1::ModePolicy policy;
  policy.set_empty_contributions(true);
  return std::make_unique<Backup>(options, num_workers, std::move(policy));
}

}  // namespace ps
