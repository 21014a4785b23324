#include <algorithm>

#include "absl/strings/str_cat.h"
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

  v1::ModePolicy policy() const override {
    v1::ModePolicy policy;
    policy.set_empty_contributions(true);
    return policy;
  }

  // A rank's new owner counts from the highest clock, at which it starts or, by what other shards have seen, later. The
  // first one after a checkpoint goes on where the rank was, and so does each where who was lost is waited for.
  std::vector<StepSet> SetMembers(const ModeMembers& members) override {
    const bool keeps_lost = OnLoss() == LossAction::kWait;
    uint64_t highest = 0;
    for (const auto& [rank, clock] : clocks_) highest = std::max(highest, clock.next_step);
    for (const auto& [rank, member] : members) {
      Clock& clock = clocks_[rank];
      const uint64_t next_step = clock.restored || keeps_lost ? clock.next_step : highest;
      if (clock.incarnation != member.incarnation) clock = {.incarnation = member.incarnation, .next_step = next_step};
      clock.waited_for = !member.done;
    }
    for (auto& [rank, clock] : clocks_) clock.waited_for = clock.waited_for && (keeps_lost || members.contains(rank));
    return {};
  }

  // No well-behaved worker gets here: its pull has waited.
  Admission Admit(const PushHeader& push, uint64_t expected) const override {
    Admission admission = EachPush::Admit(push, expected);
    if (admission.kind != Admission::Kind::kAccept || MayRead(push.rank, push.step)) return admission;
    return {.kind = Admission::Kind::kReject,
            .why = absl::FailedPreconditionError(absl::StrCat(
                "rank ", push.rank, ", step ", push.step, ": more than --staleness=", options().staleness,
                " steps ahead of the slowest worker, which is at step ", Slowest(), "; its pull has to wait"))};
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
    uint64_t highest = 0;
    for (const auto& [rank, clock] : clocks_) {
      if (!clock.waited_for) continue;
      highest = std::max(highest, clock.next_step);
      if (clock.next_step == step()) slowest.push_back(rank);
    }
    return highest > step() + options().staleness ? slowest : std::vector<uint32_t>();
  }
  uint64_t step() const override {
    const uint64_t slowest = Slowest();
    return slowest == UINT64_MAX ? 0 : slowest;
  }

  nlohmann::ordered_json Save() const override {
    nlohmann::ordered_json clocks = nlohmann::ordered_json::array();
    for (const auto& [rank, clock] : clocks_) clocks.push_back({rank, clock.next_step});
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
    for (const auto& clock : *clocks) {
      clocks_[clock[0].get<uint32_t>()] = {.next_step = clock[1].get<uint64_t>(), .restored = true};
    }
    return absl::OkStatus();
  }

 private:
  struct Clock {
    uint64_t incarnation = 0;
    uint64_t next_step = 0;
    bool waited_for = false;
    bool restored = false;  // From a checkpoint, and nobody has owned the rank since.
  };

  void Advance(uint32_t rank, uint64_t next_step) {
    const auto clock = clocks_.find(rank);
    if (clock != clocks_.end()) clock->second.next_step = std::max(clock->second.next_step, next_step);
  }

  // The lowest clock of those who are waited for; the largest number if there is none.
  uint64_t Slowest() const {
    uint64_t slowest = UINT64_MAX;
    for (const auto& [rank, clock] : clocks_) {
      if (clock.waited_for) slowest = std::min(slowest, clock.next_step);
    }
    return slowest;
  }

  std::map<uint32_t, Clock> clocks_;  // Also of ranks that have left.
};

}  // namespace

std::unique_ptr<Mode> MakeSsp(const ModeOptions& options, uint32_t num_workers) {
  return std::make_unique<Ssp>(options, num_workers);
}

}  // namespace ps
