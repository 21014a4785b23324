// A mode decides which pushes make the next version, who may read it, and what the loss of a worker means. It is a
// deterministic state machine without I/O, locks or clocks: its owner feeds it events and carries out its decisions.
// Nothing outside of this folder asks which mode it is.
//
// The owner is a shard, or, where all shards must apply the same contributions, also the chief (StepCoordinator): then
// the chief's instance names the sets, and the shards' instances only follow. `Complete` proposes; nothing moves until
// the owner says `Decided`, so that instances that follow keep the same state as the chief's. Where a set waits for a
// while (Window), its owner keeps the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/config/mode_options.h"

namespace ps {

// Pushes that are counted together: those of this step of `ranks` (ascending).
struct StepSet {
  uint64_t step = 0;
  std::vector<uint32_t> ranks;
  bool makes_version = true;  // False: they are empty, and counting them is all.
  // Where ranks number their pushes by themselves and a set has several of them, the step of each rank's; `step` is
  // then the number of the set. Else empty.
  std::vector<uint64_t> steps = {};

  uint64_t step_of(size_t i) const { return steps.empty() ? step : steps[i]; }
  bool operator==(const StepSet&) const = default;
};

// A push, as far as a mode is concerned.
struct PushHeader {
  uint32_t rank = 0;
  uint64_t step = 0;
  uint64_t version = 0;  // It was computed on this one.
  uint32_t samples = 0;  // 0: an empty contribution.
  // For the chief's instance: when it heard that the push was complete on all shards, and how long it took to come.
  TimePoint at = {};
  std::chrono::nanoseconds took{0};
};

// A live worker, as far as a mode is concerned.
struct ModeMember {
  uint64_t incarnation = 0;
  bool done = false;             // It pushes nothing any more.
  bool counts_as_empty = false;  // It is done, and steps that others still make do not need it.

  bool operator==(const ModeMember&) const = default;
};
using ModeMembers = std::map<uint32_t, ModeMember>;  // The key is the rank.

// What becomes of a push that comes now.
struct Admission {
  enum class Kind {
    kAccept,
    kStale,   // It is answered STALE and changes nothing: well-behaved workers send such pushes in this mode.
    kReject,  // No well-behaved worker sends it; `why` is its error.
  };
  Kind kind = Kind::kAccept;
  absl::Status why = absl::OkStatus();
};

class Mode {
 public:
  Mode(const ModeOptions& options, uint32_t num_workers, v1::ModePolicy policy)
      : options_(options), num_workers_(num_workers), policy_(std::move(policy)) {}
  virtual ~Mode() = default;

  // ---- What it is, for workers and messages

  std::string name() const { return options_.name; }

  // Version v + 1 is made of the pushes of step v, so that version and step advance together. Else ranks number their
  // pushes by themselves, and each push makes a version, or, where sets are coordinated, some of them together.
  virtual bool synchronous() const = 0;

  // What it asks of workers, but for the optimizer of LocalSteps, which its owner knows.
  const v1::ModePolicy& policy() const { return policy_; }

  // Whether a push may carry this: a gradient goes to the optimizer, a difference of weights to the outer one.
  virtual bool Takes(v1::Contribution contribution) const {
    return contribution == (policy_.has_local_steps() ? v1::CONTRIBUTION_WEIGHT_DIFFERENCE : v1::CONTRIBUTION_GRADIENT);
  }

  // The version that a worker that pushed `step` computes its next gradient on: this one at least, and exactly this one
  // where the policy has exact_versions. Nothing: any version will do.
  virtual std::optional<uint64_t> VersionAfter(uint64_t step) const = 0;

  // ---- What its owner has to provide

  // Every shard must apply the same sets, so with several shards the chief names them.
  virtual bool coordinated() const = 0;
  // Whether the chief does: also for one shard, where sets depend on time.
  virtual bool led(uint32_t num_shards) const { return coordinated() && num_shards > 1; }

  // A shard must be able to hold all bytes of so many pushes at once, or no version is ever made.
  virtual uint32_t pushes_held() const = 0;

  // Pushes with the same number here are added up, and so have to carry the same slices of the model. Nothing: each is
  // applied by itself.
  virtual std::optional<uint64_t> AddedUpAs(uint64_t step) const = 0;

  // Whether a push that is complete counts for its rank, whoever owns the rank by then: so it is where a new owner
  // sends the same push again. Else the push is dropped, undecided, when the rank's owner changes.
  virtual bool counts_for_any_owner() const = 0;

  // ---- What becomes of an applied gradient

  // The learning rate of a version of so many gradients is multiplied by that (--lr_scale).
  float LearningRateFactor(size_t gradients) const;
  // So many usually make a version; 0: it is not known.
  virtual uint32_t usual_gradients() const { return options_.usual_workers; }

  // The learning rate of a push of this staleness is divided by that.
  virtual float LearningRateDivisor(uint64_t /*staleness*/) const { return 1.0F; }

  // λ of DC-ASGD: the gradient is g + λ·g⊙g⊙(w − w_pulled). Unless 0, the shard keeps what each worker pulled last.
  virtual float delay_compensation() const { return 0.0F; }

  // ---- What pushes weigh

  // A version's mean is weighted by samples; else the pushes that have samples weigh the same.
  virtual bool weighs_by_samples() const { return true; }

  // ---- What becomes of a buffer of the mean

  // How far a version moves a buffer towards what is pushed: the whole way, where what is pushed is the mean of all.
  virtual float buffer_share() const { return 1.0F; }
  // How much of a difference that is pushed is added to it: all, where that is the mean of all differences, or a share
  // already.
  virtual float difference_share() const { return 1.0F; }

  // ---- Events and decisions

  // Who takes part from now on. Returns the sets that are fixed by it, in order: somebody whom they waited for has
  // left.
  virtual std::vector<StepSet> SetMembers(const ModeMembers& members) = 0;

  // For the chief's instance: these ranks' workers have nothing to push until they get more work, which may never be.
  // Returns the sets that are fixed by it.
  virtual std::vector<StepSet> SetIdle(const std::set<uint32_t>& /*ranks*/) { return {}; }

  // What becomes of this push. `expected` is the step after the rank's last one.
  virtual Admission Admit(const PushHeader& push, uint64_t expected) const = 0;

  // The push is complete, and would still be accepted. Returns the sets that are fixed by it, in order.
  virtual std::vector<StepSet> Complete(const PushHeader& push) = 0;

  // The push was dropped before it was decided on.
  virtual void Dropped(uint32_t rank, uint64_t step) = 0;

  // The set was decided, here or by the chief: the mode moves on. Pushes that are older than oldest() are to be
  // refused.
  virtual void Decided(const StepSet& set) = 0;

  // The push of this step is part of the current version.
  virtual void Applied(uint32_t /*rank*/, uint64_t /*step*/) {}

  // The set was decided, but its push turned out not to be finite: there is no version of it. Where each push makes
  // one.
  virtual void Refused(const StepSet& /*set*/) {}

  // Whether the set was decided before: the chief may name one again.
  virtual bool WasDecided(const StepSet& set) const = 0;
  // Whether this push can be in no set any more, for one was decided that had it, or that it came too late for.
  virtual bool WasDecided(uint32_t rank, uint64_t step) const = 0;

  // A set could be decided now, and waits for more pushes to join it; of that, its owner says WindowOver once it has
  // waited for so long. Each set's number is another.
  struct Window {
    uint64_t number = 0;
    std::chrono::nanoseconds length{0};
  };
  virtual std::vector<Window> windows() const { return {}; }
  virtual std::vector<StepSet> WindowOver(uint64_t /*number*/) { return {}; }

  // Admit calls a push stale if its step is an earlier one, or if it was computed on an earlier version, and for no
  // other reason.
  struct Oldest {
    uint64_t step = 0;
    uint64_t version = 0;
  };
  virtual Oldest oldest() const { return {}; }

  // Whether ranks wait for others: for their pushes, or until they have come as far.
  virtual bool ranks_wait() const { return true; }

  // Whether a rank may read the current version to compute its push of `step` on it; else it is parked until it may.
  virtual bool MayRead(uint32_t /*rank*/, uint64_t /*step*/) const { return true; }

  // The rank waits for weights to compute its push of `step` on.
  virtual void Reads(uint32_t /*rank*/, uint64_t /*step*/) {}

  // What is to be done when a member is lost, or leaves before it is done. Whether the others wait for its rank or go
  // on without it, SetMembers is told when the rank has a member again.
  virtual LossAction OnLoss() const { return loss_action_; }

  // The step at which a worker that joins now starts, unless it has one of its own: where ranks go on by themselves,
  // from a checkpoint, or where its rank was left and is waited for (LossAction::kWait). `highest` is one more than the
  // highest step that any shard has complete, `applied` the version of a shard that decides by itself, with the step
  // that it has decided on already.
  virtual uint64_t StartStep(uint64_t highest, uint64_t applied) const = 0;

  // ---- The version in the making

  // The step of the version in the making, for messages. 0 where a version waits for nobody.
  virtual uint64_t step() const = 0;

  // The ranks that the version in the making waits for, ascending; empty where a version waits for nobody. An instance
  // that follows names those, too, whose push is complete.
  virtual std::vector<uint32_t> WaitsFor() const = 0;
  // Where not all of these have to push: whether so many complete pushes are enough for some version.
  virtual bool Enough(size_t /*complete*/) const { return false; }

  // The ranks that the version in the making will be made of, ascending, where they are known before their pushes are
  // complete, so that it can be built speculatively; else empty. How many they are is known without looking at each.
  virtual std::vector<uint32_t> ExpectedContributors() const = 0;
  virtual size_t expected() const = 0;

  // A rank that is done, or was when its member left, that does not count as empty, and whose push the step in the
  // making needs; `begun` are the ranks whose push of step() has begun. Nothing where no push of that step has begun,
  // or where a version waits for nobody.
  virtual std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun) const = 0;

  // ---- Its state, for a checkpoint

  // Between two steps: pushes that were complete but not decided are not part of it.
  virtual nlohmann::ordered_json Save() const = 0;
  // What Save gave, of the same mode, and the same options. INVALID_ARGUMENT, naming the field, for anything else; then
  // nothing has changed.
  virtual absl::Status Load(const nlohmann::ordered_json& state) = 0;

 protected:
  const ModeOptions& options() const { return options_; }
  uint32_t num_workers() const { return num_workers_; }

 private:
  const ModeOptions options_;
  const LossAction loss_action_ = options_.loss_action();  // It is asked for each rank of each step.
  const uint32_t num_workers_;
  const v1::ModePolicy policy_;
};

// For Admit: a push of any step but this one is refused. `what` is the error's text before the step.
Admission AdmitOnly(uint64_t step, const PushHeader& push, const char* what);

// The modes. Each is a file of its own.
std::unique_ptr<Mode> MakeBsp(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeAsp(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeSsp(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeBackup(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeLocalSgd(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeDiloco(const ModeOptions& options, uint32_t num_workers);
std::unique_ptr<Mode> MakeEasgd(const ModeOptions& options, uint32_t num_workers);

// The mode that the options name; they must be valid (ValidateModeOptions).
std::unique_ptr<Mode> MakeMode(const ModeOptions& options, uint32_t num_workers);

// Load calls these: INVALID_ARGUMENT if the state is not of the mode of this name; then also if it has no such number.
absl::Status CheckSavedMode(const nlohmann::ordered_json& state, const std::string& name);
absl::StatusOr<uint64_t> SavedNumber(const nlohmann::ordered_json& state, const std::string& name,
                                     const std::string& field);

}  // namespace ps
