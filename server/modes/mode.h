// A mode decides which pushes make the next version, who may read it, and what the loss of a worker means. It is a
// deterministic state machine without I/O, locks or clocks: its owner feeds it events and carries out its decisions.
// Nothing outside of this folder asks which mode it is.
//
// The owner is a shard, or, where all shards must apply the same contributions, also the chief (StepCoordinator): then
// the chief's instance names the sets, and the shards' instances only follow. `Complete` proposes; nothing moves until
// the owner says `Decided`, so that instances that follow keep the same state as the chief's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

// Pushes that make one version together: those of this step of `ranks` (ascending).
struct StepSet {
  uint64_t step = 0;
  std::vector<uint32_t> ranks;

  bool operator==(const StepSet&) const = default;
};

// A push, as far as a mode is concerned.
struct PushHeader {
  uint32_t rank = 0;
  uint64_t step = 0;
  uint64_t version = 0;  // That it was computed on.
  uint32_t samples = 0;  // 0: an empty contribution.
};

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

// What a push carries.
enum class Contribution { kGradient, kWeightDifference };

// What becomes of a running job that loses a worker whose work is not done.
enum class LossAction {
  kFail,      // The job fails.
  kWait,      // Its step waits until another worker has taken the rank.
  kContinue,  // The others go on without it.
};

class Mode {
 public:
  virtual ~Mode() = default;

  // ---- What it is, for workers and messages

  virtual std::string name() const = 0;

  // Version v + 1 is made of the pushes of step v, so that version and step advance together; else every push makes a
  // version.
  virtual bool synchronous() const = 0;

  virtual Contribution contribution() const = 0;

  // The version that a worker that pushed `step` computes its next gradient on; nothing: the newest.
  virtual std::optional<uint64_t> VersionAfter(uint64_t step) const = 0;

  // ---- What its owner has to provide

  // Every shard must apply the same sets, so with several shards the chief names them.
  virtual bool coordinated() const = 0;

  // Pushes of which a shard must be able to hold all bytes at once, or no version is ever made.
  virtual uint32_t pushes_held() const = 0;

  // ---- Events and decisions

  // The ranks that take part from now on.
  virtual void SetMembers(const std::set<uint32_t>& ranks) = 0;

  // What becomes of this push. `expected` is the step after the rank's last one.
  virtual Admission Admit(const PushHeader& push, uint64_t expected) const = 0;

  // The push of `rank` is complete. Returns the sets that are fixed by it, in order.
  virtual std::vector<StepSet> Complete(uint32_t rank, uint64_t step) = 0;

  // The set was decided, here or by the chief: the mode moves on.
  virtual void Decided(const StepSet& set) = 0;

  // Whether this set was decided before: the chief may name one again.
  virtual bool WasDecided(const StepSet& set) const = 0;

  // Whether a rank whose next push is that of `next_step` may read the version `newest`, which exists; else it is
  // parked until it may.
  virtual bool MayRead(uint32_t rank, uint64_t next_step, uint64_t newest) const = 0;

  // A member was lost, or left before it was done.
  virtual LossAction OnLoss(uint32_t rank) const = 0;

  // The step at which a worker that joins now starts; `highest` is one more than the highest step that any shard has
  // complete, `applied` the version of a shard that decides by itself.
  virtual uint64_t StartStep(uint64_t highest, uint64_t applied) const = 0;

  // ---- The version in the making

  // Its step, for messages. 0 where a version waits for nobody.
  virtual uint64_t step() const = 0;

  // The ranks that it waits for; empty where a version waits for nobody.
  virtual std::vector<uint32_t> WaitsFor() const = 0;

  // The ranks that it will be made of, ascending, where that is known before their pushes are complete, so that it can
  // be built speculatively; else empty.
  virtual std::vector<uint32_t> ExpectedContributors() const = 0;

  // A rank that it needs a push of, but that is `done` and pushes nothing any more; `begun` are the ranks whose push of
  // step() has begun. Nothing where none of it has, or where a version waits for nobody.
  virtual std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun, const std::set<uint32_t>& done) const = 0;

  // ---- Its state, for a checkpoint

  // Between two steps: pushes that were complete but not decided are not part of it.
  virtual nlohmann::ordered_json Save() const = 0;
  // What Save gave, of the same mode. INVALID_ARGUMENT, naming the field, for anything else; then nothing has changed.
  virtual absl::Status Load(const nlohmann::ordered_json& state) = 0;
};

// Synchronous: version v + 1 is made of the pushes of step v of all `num_workers` ranks.
std::unique_ptr<Mode> MakeBsp(uint32_t num_workers);

// Asynchronous: every push makes a version.
std::unique_ptr<Mode> MakeAsp();

// For Load: INVALID_ARGUMENT if the state is not of the mode of this name.
absl::Status CheckSavedMode(const nlohmann::ordered_json& state, const std::string& name);

// The mode of this name (bsp or sync, asp or async). INVALID_ARGUMENT for any other.
absl::StatusOr<std::unique_ptr<Mode>> MakeMode(const std::string& name, uint32_t num_workers);

}  // namespace ps
