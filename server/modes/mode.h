// A mode decides which pushes make the next version. It is a deterministic state machine without I/O, locks or clocks:
// its owner feeds it events and carries out its decisions.
//
// The owner is a shard (asynchronous modes, or one shard), or the chief (a synchronous mode, over several shards; the
// shards then follow its decisions). `Complete` proposes; nothing moves until the owner says `Decided`, so that shards
// that follow keep the same state as the chief.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

// Pushes that make one version together: those of `ranks` (ascending).
struct StepSet {
  uint64_t step = 0;  // In a synchronous mode: the step, and the version it is computed on. Else 0.
  std::vector<uint32_t> ranks;

  bool operator==(const StepSet&) const = default;
};

class Mode {
 public:
  virtual ~Mode() = default;

  virtual std::string name() const = 0;

  // True if a version is made of the pushes of one step (so version v is made of step v - 1's), false if every push
  // makes a version.
  virtual bool synchronous() const = 0;

  // The ranks that take part from now on.
  virtual void SetMembers(const std::set<uint32_t>& ranks) = 0;

  // Whether a push of this rank and step may come now. `expected` is the step after the rank's last one. OUT_OF_RANGE
  // if no well-behaved worker would send it.
  virtual absl::Status Admit(uint32_t rank, uint64_t step, uint64_t expected) const = 0;

  // The push of `rank` is complete. Returns the sets that are fixed by it, in order.
  virtual std::vector<StepSet> Complete(uint32_t rank, uint64_t step) = 0;

  // The set was decided, here or by the chief: the mode moves on.
  virtual void Decided(const StepSet& set) = 0;

  // The step at which a worker that joins now starts; `highest` is one more than the highest step seen.
  virtual uint64_t StartStep(uint64_t highest) const = 0;

  // The ranks that the version in the making waits for; empty where a version waits for nobody.
  virtual std::vector<uint32_t> WaitsFor() const = 0;

  // The ranks that the version in the making will be made of, ascending, where that is known before their pushes are
  // complete, so that it can be built ahead; else empty.
  virtual std::vector<uint32_t> ExpectedContributors() const = 0;

  // A rank that the version in the making needs a push of, but that is `done` and pushes nothing any more; `begun` are
  // the ranks whose push of step() has begun. Nothing where none of it has, or where a version waits for nobody.
  virtual std::optional<uint32_t> NeedsDone(const std::set<uint32_t>& begun, const std::set<uint32_t>& done) const = 0;

  // The step in the making, for messages. 0 where a version waits for nobody.
  virtual uint64_t step() const = 0;
};

// Synchronous: version v + 1 is made of the pushes of step v of all `num_workers` ranks.
std::unique_ptr<Mode> MakeBsp(uint32_t num_workers);

// Asynchronous: every push makes a version.
std::unique_ptr<Mode> MakeAsp();

// The mode of this name (bsp or sync, asp or async). INVALID_ARGUMENT for any other.
absl::StatusOr<std::unique_ptr<Mode>> MakeMode(const std::string& name, uint32_t num_workers);

}  // namespace ps
