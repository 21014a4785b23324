// What the modes have in common in which version v + 1 is made of the pushes of step v: which step it is, which of its
// pushes are complete, and who counts as an empty contribution.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/modes/mode.h"

namespace ps {

class Gather : public Mode {
 public:
  Gather(const ModeOptions& options, uint32_t num_workers) : options_(options), num_workers_(num_workers) {}

  std::string name() const override { return options_.name; }
  bool synchronous() const override { return true; }
  bool Takes(v1::Contribution contribution) const override { return contribution == v1::CONTRIBUTION_GRADIENT; }
  std::optional<uint64_t> VersionAfter(uint64_t step) const override { return step + 1; }

  bool coordinated() const override { return true; }
  uint32_t pushes_held() const override { return num_workers_; }

  std::vector<StepSet> SetMembers(const ModeMembers& members) override;
  std::vector<StepSet> Complete(const PushHeader& push) override;
  void Dropped(uint32_t rank, uint64_t step) override;
  void Decided(const StepSet& set) override;
  bool WasDecided(const StepSet& set) const override { return set.step < step_; }
  LossAction OnLoss() const override { return loss_action_; }

  // An instance that follows or leads is at the step in the making; one shard alone says how far it is by its version.
  uint64_t StartStep(uint64_t /*highest*/, uint64_t applied) const override { return std::max(step_, applied); }

  uint64_t step() const override { return step_; }
  std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun, const std::set<uint32_t>& done) const override;

  nlohmann::ordered_json Save() const override;
  absl::Status Load(const nlohmann::ordered_json& state) override;

 protected:
  struct Arrival {
    uint32_t rank = 0;
    bool empty = false;
  };

  // The ranks whose pushes make the step in the making, if they are known now.
  virtual std::optional<std::vector<uint32_t>> Decide() const = 0;

  const ModeOptions& options() const { return options_; }
  uint32_t num_workers() const { return num_workers_; }
  const ModeMembers& members() const { return members_; }
  // Ranks whose member is gone before it was done, and that nobody has taken since.
  const std::set<uint32_t>& lost_ranks() const { return lost_ranks_; }
  // Ranks that push nothing any more and count as empty, also those that have left.
  const std::set<uint32_t>& empty_ranks() const { return empty_ranks_; }
  // The pushes of the step in the making, in the order in which they were completed; a rank is there once.
  const std::vector<Arrival>& arrived() const { return arrived_; }
  bool HasArrived(uint32_t rank) const;

 private:
  std::vector<StepSet> Fixed() const;

  const ModeOptions options_;
  const LossAction loss_action_ = options_.loss_action();  // It is asked for each rank of each step.
  const uint32_t num_workers_;
  ModeMembers members_;
  std::set<uint32_t> empty_ranks_;
  std::set<uint32_t> lost_ranks_;
  uint64_t step_ = 0;
  std::vector<Arrival> arrived_;
};

// A step of everybody: what bsp and local_sgd wait for.
//
// The ranks are all of 0 to num_workers - 1, but for those that count as empty, and for lost ones where the others go
// on without them. There a rank without a member is a lost one: no job begins, and none goes on after a checkpoint,
// before those are there that it has to wait for.
class Barrier : public Gather {
 public:
  using Gather::Gather;

  v1::ModePolicy policy() const override;
  // A lost rank's push of the step in the making is dropped with it where the others go on, and also where its
  // replacement would push another (--error_feedback): some shards would have the one, and some the other.
  bool counts_for_any_owner() const override { return OnLoss() != LossAction::kContinue && !options().error_feedback; }
  Admission Admit(const PushHeader& push, uint64_t expected) const override;
  std::vector<uint32_t> WaitsFor() const override;
  std::vector<uint32_t> ExpectedContributors() const override;

 protected:
  std::optional<std::vector<uint32_t>> Decide() const override;
};

}  // namespace ps
