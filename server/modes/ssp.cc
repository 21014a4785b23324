#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "common/status.h"
#include "server/modes/each_push.h"

namespace ps {
namespace {

// Stale synchronous: a rank's clock is the step that it computes next, and it may compute while its clock is at most
// `staleness` ahead of the slowest rank's that is live, or lost and waited for, and not done. So what it reads has all
// pushes of the steps before clock − staleness. An empty contribution advances the clock, and makes no version. Source:
// Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013.
class Ssp final : public EachPush {
 public:
  using EachPush::EachPush;

  bool ranks_wait() const override { return true; }

  // A rank's new owner counts from the highest clock, at which it starts or, by what other shards have seen, later. The
  // one that is there when a restored job begins to run goes on where the rank was, and so does each where who was lost
  // is waited for. Where the chief hands out the work, a rank that the checkpoint does not have has no place to go on.
  std::vector<StepSet> SetMembers(const ModeMembers& members) override {
    const bool keeps_lost = OnLoss() == LossAction::kWait;
    uint64_t highest = 0;
    for (const auto& [rank, clock] : clocks_) highest = std::max(highest, clock.next_step);
    for (const auto& [rank, member] : members) {
      const bool is_known = clocks_.contains(rank) || !options().hands_out_runs;
      Clock& clock = clocks_[rank];
      const uint64_t next_step = (restored_ && is_known) || keeps_lost ? clock.next_step : highest;
      if (clock.incarnation != member.incarnation) clock = {.incarnation = member.incarnation, .next_step = next_step};
    }
    std::set<std::pair<uint64_t, uint32_t>> waited_for;
    for (const auto& [rank, clock] : clocks_) {
      const auto member = members.find(rank);
      const bool waits =
          member == members.end() ? keeps_lost && waited_for_.contains({clock.next_step, rank}) : !member->second.done;
      if (waits) waited_for.insert({clock.next_step, rank});
    }
    waited_for_ = std::move(waited_for);
    restored_ = false;
    members_ = members;
    return {};
  }

  // No well-behaved worker gets here: its pull has waited.
  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    Admission admission = EachPush::Admit(push, expected);
    if (admission.kind != Admission::Kind::kAccept || MayRead(push.rank, push.step)) return admission;
    return {.kind = Admission::Kind::kReject,
            .why = FailedPrecondition(
                "rank ", push.rank, ", step ", push.step, ": more than --staleness=", options().staleness,
                " steps ahead of the slowest worker, which is at step ", Slowest(), "; its pull has to wait")};
  }

  std::vector<StepSet> Complete(const PushHeader& push) override {
    return {{.step = push.step, .ranks = {push.rank}, .makes_version = push.samples > 0}};
  }

  void Applied(uint32_t rank, uint64_t step) override { Advance(rank, step + 1); }
  void Reads(uint32_t rank, uint64_t step) override { Advance(rank, step); }

  bool MayRead(uint32_t rank, uint64_t step) const override {
    const auto clock = clocks_.find(rank);
    const uint64_t next = clock == clocks_.end() ? step : std::max(step, clock->second.next_step);
    const uint64_t slowest = Slowest();
    return next <= slowest || next - slowest <= options().staleness;
  }

  // Those that are parked wait for the slowest ranks.
  std::vector<uint32_t> WaitsFor() const override {
    std::vector<uint32_t> slowest;
    if (waited_for_.empty() || waited_for_.rbegin()->first <= step() + options().staleness) return slowest;
    for (const auto& [next_step, rank] : waited_for_) {
      if (next_step != step()) break;
      slowest.push_back(rank);
    }
    return slowest;
  }
  uint64_t step() const override {
    const uint64_t slowest = Slowest();
    return slowest == UINT64_MAX ? 0 : slowest;
  }

  nlohmann::ordered_json Save() const override {
    nlohmann::ordered_json clocks = nlohmann::ordered_json::array();
    const bool all = OnLoss() == LossAction::kWait || !options().hands_out_runs;
    for (const auto& [rank, clock] : clocks_) {
      if (all || members_.contains(rank)) clocks.push_back({rank, clock.next_step});
    }
    return {{"mode", name()}, {"clocks", std::move(clocks)}};
  }

  absl::Status Load(const nlohmann::ordered_json& state) override {
    PS_RETURN_IF_ERROR(CheckSavedMode(state, name()));
    const auto clocks = state.find("clocks");
    const auto is_clock = [](const nlohmann::ordered_json& clock) {
      return clock.is_array() && clock.size() == 2 && clock[0].is_number_unsigned() && clock[1].is_number_unsigned();
    };
    if (clocks == state.end() || !clocks->is_array() || !std::all_of(clocks->begin(), clocks->end(), is_clock)) {
      return absl::InvalidArgumentError("the mode's state: clocks: expected pairs of rank and step");
    }
    clocks_.clear();
    waited_for_.clear();
    for (const auto& clock : *clocks) {
      clocks_[clock[0].get<uint32_t>()] = {.next_step = clock[1].get<uint64_t>()};
    }
    restored_ = true;
    return absl::OkStatus();
  }

 private:
  struct Clock {
    uint64_t incarnation = 0;
    uint64_t next_step = 0;
  };

  void Advance(uint32_t rank, uint64_t next_step) {
    const auto clock = clocks_.find(rank);
    if (clock == clocks_.end() || next_step <= clock->second.next_step) return;
    if (waited_for_.erase({clock->second.next_step, rank}) > 0) waited_for_.insert({next_step, rank});
    clock->second.next_step = next_step;
  }

  // The lowest clock of those who are waited for; the largest number if there is none.
  uint64_t Slowest() const { return waited_for_.empty() ? UINT64_MAX : waited_for_.begin()->first; }

  ModeMembers members_;
  std::map<uint32_t, Clock> clocks_;                    // Also of ranks that have left.
  bool restored_ = false;                               // The clocks are a checkpoint's, and the job did not run since.
  std::set<std::pair<uint64_t, uint32_t>> waited_for_;  // The clocks of those who are waited for, and their ranks.
};

}  // namespace

std::unique_ptr<Mode> MakeSsp(const ModeOptions& options, uint32_t num_workers) {
  v1::ModePolicy policy;
  policy.set_empty_contributions(true);
  return std::make_unique<Ssp>(options, num_workers, std::move(policy));
}

}  // namespace ps
