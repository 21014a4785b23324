#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/status.h"
#include "server/base/first_of.h"
#include "server/modes/each_push.h"
#include "server/modes/gather.h"
#include "server/modes/grace.h"

namespace ps {
namespace {

// A step is a long round of batches, after which servers apply their outer optimizer to the mean of all workers'
// differences of weights. Source: Douillard et al., DiLoCo, 2023 (arXiv:2311.08105).
class DilocoBarrier final : public BarrierOfRounds {
 public:
  using BarrierOfRounds::BarrierOfRounds;

  bool weighs_by_samples() const override { return options().outer_weighting == "samples"; }
};

// Nobody waits: each difference is applied when it comes, whatever version it began with. Source: Liu et al.,
// Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135).
class DilocoAsync final : public EachPush {
 public:
  using EachPush::EachPush;

  float difference_share() const override { return 1.0F / static_cast<float>(options().buffer(num_workers())); }
};

// Nobody waits for the slowest: a round is the pushes of the first `quorum` workers, and of those that come in a window
// of grace after them. Each rank numbers its pushes by itself, and a push joins the round that is open when it is
// complete, whatever version it began with. Each fragment has a round of its own. Source: Decoupled DiLoCo, 2026
// (arXiv:2604.21428).
class DilocoQuorum final : public EachPush {
 public:
  DilocoQuorum(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy)
      : EachPush(options, num_workers, std::move(policy)), ranks_(num_workers) {
    const v1::LocalSteps& local = this->policy().local_steps();
    rounds_.resize(local.fragments());
    for (Round& round : rounds_) round.number = ++windows_begun_;
    const std::optional<std::chrono::nanoseconds> fixed = *ParseGrace(options.grace);
    fixed.has_value() ? (void)(grace_ = *fixed) : (void)auto_.emplace(num_workers, local.steps(), local.overlap());
  }

  bool weighs_by_samples() const override { return options().outer_weighting == "samples"; }
  float buffer_share() const override { return 1.0F; }

  bool ranks_wait() const override { return true; }
  bool coordinated() const override { return true; }
  bool led(uint32_t /*num_shards*/) const override { return true; }
  uint32_t pushes_held() const override { return num_workers(); }
  std::optional<uint64_t> AddedUpAs(uint64_t step) const override { return step % rounds_.size(); }

  std::vector<StepSet> SetMembers(const ModeMembers& members) override {
    for (uint32_t number = 0; number < num_workers(); ++number) {
      Rank& rank = ranks_[number];
      const auto member = members.find(number);
      const uint64_t incarnation = member == members.end() ? 0 : member->second.incarnation;
      if (incarnation != rank.incarnation) {
        rank.incarnation = incarnation;
        rank.counts = !begun_;
        if (auto_.has_value()) auto_->Left(number);
      }
      rank.live = member != members.end() && !member->second.done;
    }
    return Fixed();
  }

  std::vector<StepSet> SetIdle(const std::set<uint32_t>& ranks) override {
    for (uint32_t number = 0; number < num_workers(); ++number) ranks_[number].idle = ranks.contains(number);
    return Fixed();
  }

  std::vector<StepSet> Complete(const PushHeader& push) override {
    Check(push.rank < num_workers(), "a push is of a rank of the job");
    Round& round = rounds_[push.step % rounds_.size()];
    if (!round.arrived.emplace(push.rank, push.step).second) return {};
    begun_ = ranks_[push.rank].counts = true;
    if (auto_.has_value()) {
      auto_->Arrived(push.rank, push.at, push.took);
      if (round.arrived.size() == 1) round.first_at = push.at;
      if (round.arrived.size() == needed()) auto_->QuorumAfter(push.at - round.first_at);
    }
    return Fixed();
  }

  void Dropped(uint32_t rank, uint64_t step) override {
    Round& round = rounds_[step % rounds_.size()];
    const auto arrived = round.arrived.find(rank);
    if (arrived != round.arrived.end() && arrived->second == step) round.arrived.erase(arrived);
  }

  std::vector<Window> windows() const override {
    std::vector<Window> open;
    for (const Round& round : rounds_) {
      if (HasQuorum(round)) open.push_back({.number = round.number, .length = length()});
    }
    return open;
  }

  std::vector<StepSet> WindowOver(uint64_t number) override {
    for (const Round& round : rounds_) {
      if (round.number == number && HasQuorum(round)) return {SetOf(round, version_)};
    }
    return {};
  }

  void Decided(const StepSet& set) override {
    for (size_t i = 0; i < set.ranks.size(); ++i) {
      Dropped(set.ranks[i], set.step_of(i));
      uint64_t& next = ranks_[set.ranks[i]].next;
      next = std::max(next, set.step_of(i) + 1);
    }
    if (!set.ranks.empty()) rounds_[set.step_of(0) % rounds_.size()].number = ++windows_begun_;
    version_ = set.step + 1;
  }
  bool WasDecided(const StepSet& set) const override { return set.step < version_; }
  bool WasDecided(uint32_t rank, uint64_t step) const override { return step < ranks_[rank].next; }

  uint64_t step() const override { return version_; }
  std::vector<uint32_t> WaitsFor() const override {
    return NumbersWhere(num_workers(), [this](uint32_t rank) { return ranks_[rank].live; });
  }
  // In fragments the pushes are of several rounds.
  bool Enough(size_t complete) const override { return rounds_.size() == 1 && complete >= needed(); }

  nlohmann::ordered_json Save() const override { return {{"mode", name()}, {"step", version_}}; }
  absl::Status Load(const nlohmann::ordered_json& state) override {
    PS_ASSIGN_OR_RETURN(version_, SavedNumber(state, name(), "step"));
    return absl::OkStatus();
  }

 private:
  // The pushes of one fragment that are complete and in no set yet, by rank: their steps.
  struct Round {
    std::map<uint32_t, uint64_t> arrived;
    uint64_t number = 0;  // Its window's.
    TimePoint first_at;
  };

  struct Rank {
    uint64_t incarnation = 0;  // 0: it has no worker.
    bool live = false;         // Its worker is not done.
    bool idle = false;         // It will not push, though.
    // Whether a quorum may wait for it: nobody waits for the first round of a worker that joins later.
    bool counts = true;
    uint64_t next = 0;  // The step after its last one that was decided on.

    bool waited_for() const { return live && !idle && counts; }
  };

  size_t live() const {
    return static_cast<size_t>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.waited_for(); }));
  }
  size_t needed() const { return std::clamp<size_t>(options().quorum, 1, std::max<size_t>(live(), 1)); }
  bool HasQuorum(const Round& round) const { return round.arrived.size() >= needed(); }
  // Whether every live worker waits for a round, of this fragment or another, so that nobody's push is to come.
  bool AllWait() const {
    size_t waiting = 0;
    for (const Round& round : rounds_) {
      for (const auto& [rank, step] : round.arrived) waiting += ranks_[rank].waited_for() ? 1 : 0;
    }
    return waiting >= live();
  }
  std::chrono::nanoseconds length() const { return auto_.has_value() ? auto_->length() : grace_; }

  StepSet SetOf(const Round& round, uint64_t number) const {
    StepSet set = {.step = number};
    for (const auto& [rank, step] : round.arrived) {
      set.ranks.push_back(rank);
      set.steps.push_back(step);
    }
    return set;
  }

  // The rounds that have their quorum and wait for nobody. Where all workers wait, and are in rounds of different
  // fragments, so that none has its quorum, the one that has the most pushes goes on without it.
  std::vector<StepSet> Fixed() const {
    std::vector<StepSet> sets;
    const bool all_wait = AllWait();
    for (const Round& round : rounds_) {
      if (!HasQuorum(round) || (!all_wait && length().count() > 0)) continue;
      sets.push_back(SetOf(round, version_ + sets.size()));
    }
    if (!sets.empty() || !all_wait) return sets;
    const Round& fullest = *std::max_element(rounds_.begin(), rounds_.end(), [](const Round& one, const Round& other) {
      return one.arrived.size() < other.arrived.size();
    });
    if (!fullest.arrived.empty()) sets.push_back(SetOf(fullest, version_));
    return sets;
  }

  std::vector<Rank> ranks_;
  bool begun_ = false;         // There was a push: who joins now is a newcomer.
  std::vector<Round> rounds_;  // By fragment.
  uint64_t windows_begun_ = 0;
  uint64_t version_ = 0;  // The one that the next set makes, less one.
  std::chrono::nanoseconds grace_{0};
  std::optional<AutomaticGrace> auto_;
};

}  // namespace

std::unique_ptr<Mode> MakeDiloco(const ModeOptions& options, uint32_t num_workers) {
  const bool barrier = options.outer_sync == "barrier";
  v1::ModePolicy policy = barrier ? Barrier::Policy() : v1::ModePolicy();
  v1::LocalSteps& local = *policy.mutable_local_steps();
  local.set_steps(options.batches_per_round() / options.fragments);  // They lie between two fragments.
  local.set_fragments(options.fragments);
  local.set_overlap(options.overlap);
  local.set_mix(options.mix);
  local.set_exchange(v1::LocalSteps::AVERAGE_WEIGHTS);
  if (barrier) return std::make_unique<DilocoBarrier>(options, num_workers, std::move(policy));
  if (options.outer_sync == "quorum") return std::make_unique<DilocoQuorum>(options, num_workers, std::move(policy));
  return std::make_unique<DilocoAsync>(options, num_workers, std::move(policy));
}

}  // namespace ps
