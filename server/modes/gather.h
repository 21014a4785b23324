// What the modes have in common in which version v + 1 is made of the pushes of step v: which step it is, which of its
// pushes are complete, and who counts as an empty contribution.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "server/modes/mode.h"

namespace ps {

class Gather : public Mode {
 public:
  bool synchronous() const override { return true; }
  std::optional<uint64_t> VersionAfter(uint64_t step) const override { return step + 1; }

  bool coordinated() const override { return true; }
  uint32_t pushes_held() const override { return static_cast<uint32_t>(ranks_.size()); }
  std::optional<uint64_t> AddedUpAs(uint64_t step) const override { return step; }

  std::vector<StepSet> SetMembers(const ModeMembers& members) override;
  Admission Admit(const PushHeader& push, uint64_t /*expected*/) const override {
    return AdmitOnly(step_, push, "the job's current step is ");
  }
  std::vector<StepSet> Complete(const PushHeader& push) override;
  void Dropped(uint32_t rank, uint64_t step) override;
  void Decided(const StepSet& set) override { BeginStep(set.step + 1); }
  bool WasDecided(const StepSet& set) const override { return set.step < step_; }
  bool WasDecided(uint32_t /*rank*/, uint64_t step) const override { return step < step_; }

  // An instance that follows or leads is at the step in the making; one shard alone says how far it is by its version.
  uint64_t StartStep(uint64_t /*highest*/, uint64_t applied) const override { return std::max(step_, applied); }

  uint64_t step() const override { return step_; }
  std::vector<uint32_t> WaitsFor() const override;
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun) const override;

  nlohmann::ordered_json Save() const override { return {{"mode", name()}, {"step", step_}}; }
  absl::Status Load(const nlohmann::ordered_json& state) override;

 protected:
  struct Rank {
    bool member = false;
    // The member's state, or that of the last one that left.
    enum class State {
      kNone,   // The rank never had a member.
      kWorks,  // If it has no member, it is lost, and nobody has taken it since.
      kDone,   // It pushes nothing any more,
      kEmpty,  // and counts as empty.
    };
    State state = State::kNone;
    bool needed = false;   // A step needs its push.
    bool arrived = false;  // Its push of the step in the making is complete.
  };
  // Whether a step needs the push of such a rank.
  using Needs = bool (*)(const Rank& rank, LossAction on_loss);

  Gather(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy, Needs needs);

  // The ranks whose pushes make the step in the making, if they are known now.
  virtual std::optional<std::vector<uint32_t>> Decide() const = 0;

  const std::vector<Rank>& ranks() const { return ranks_; }
  // The number of ranks that the step in the making waits for.
  size_t missing() const { return missing_; }
  // The ranks whose pushes of the step in the making are complete, in the order in which they were: those with a
  // gradient, and the empty ones. A rank is there once.
  const std::vector<uint32_t>& arrived() const { return arrived_; }
  const std::vector<uint32_t>& arrived_empty() const { return arrived_empty_; }

 private:
  std::vector<StepSet> Fixed() const;
  void CountNeeded();
  void SetArrived(uint32_t rank, bool arrived);
  void BeginStep(uint64_t step);

  const Needs needs_;
  std::vector<Rank> ranks_;
  size_t done_ = 0;  // So many of them are kDone.
  size_t missing_ = 0;
  uint64_t step_ = 0;
  std::vector<uint32_t> arrived_;
  std::vector<uint32_t> arrived_empty_;
};

// A step of everybody: what bsp, local_sgd and diloco wait for.
//
// The ranks are all of 0 to num_workers - 1, but for those that count as empty, and for lost ones where the others go
// on without them. There a rank without a member is a lost one: no job begins, and none goes on after a checkpoint,
// before those are there that it has to wait for.
class Barrier : public Gather {
 public:
  Barrier(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy);

  static v1::ModePolicy Policy();
  // A lost rank's push of the step in the making is dropped with it where the others go on, and also where its
  // replacement would push another (--error_feedback): some shards would have the one, and some the other.
  bool counts_for_any_owner() const override { return OnLoss() != LossAction::kContinue && !options().error_feedback; }
  // Whoever pushes is a contributor, needed or not.
  std::vector<uint32_t> ExpectedContributors() const override;
  size_t expected() const override { return missing() + arrived().size() + arrived_empty().size(); }

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override;
};

// A step is a round of batches that each worker takes by itself, from weights that are the same for all. What it
// pushes, the difference of its weights over the round, depends on its own optimizer's state, so a replacement's is
// another.
class BarrierOfRounds : public Barrier {
 public:
  using Barrier::Barrier;

  bool counts_for_any_owner() const override { return false; }
};

}  // namespace ps
