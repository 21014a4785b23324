// What a chief does for a mode where several shards must apply the same contributions: shards report the pushes that
// are complete on them, and it names the sets that make each step, once every shard has every push of them. Weights and
// gradients never pass through it.
//
// Pure: no locks, no I/O, no clock. It counts identities, never messages: what is told twice counts once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/chief/membership.h"
#include "server/modes/mode.h"

namespace ps {

class StepCoordinator {
 public:
  // The mode's own instance of the chief.
  StepCoordinator(std::unique_ptr<Mode> mode, uint32_t num_shards);

  const Mode& mode() const { return *mode_; }

  // Whether it names sets at all. Else each shard decides for itself, and what shards complete changes nothing here.
  bool leads() const { return mode_->coordinated() && num_shards_ > 1; }

  // Begins at this version, with a checkpoint.
  void Restore(uint64_t version);
  // A view with these members. Where the mode counts a push for its owner alone, undecided ones of other owners are
  // forgotten. Returns the sets that are named by it, in order.
  std::vector<StepSet> OnView(const Membership& members);

  struct Outcome {
    bool news = false;             // The report was not known yet, and is still of use.
    std::vector<StepSet> decided;  // The sets that are named by it, in order.
  };
  // The push is complete on the shard; its version is not used.
  Outcome Complete(uint32_t shard, uint64_t incarnation, const PushHeader& push, const Membership& members);

  // "step 3: the push of rank 1 is not complete on shard 2", for the first push that some shards have and others have
  // not; empty if there is none.
  std::string Incomplete() const;

 private:
  using Push = std::pair<uint64_t, uint32_t>;  // Step and rank.
  struct Partial {
    uint64_t incarnation = 0;  // 0: of any.
    std::vector<bool> shards;  // Those that have it,
    uint32_t count = 0;        // and how many they are.
  };

  // The mode moves on by these sets.
  std::vector<StepSet> Decide(std::vector<StepSet> sets);
  // Forgets what the set is made of, and what can be in no set any more.
  void Forget(const StepSet& decided);

  const std::unique_ptr<Mode> mode_;
  const uint32_t num_shards_;
  // Pushes that no set was named with: of some shards, and, each with its incarnation, of all.
  std::map<Push, Partial> partial_;
  std::map<Push, uint64_t> complete_;
};

}  // namespace ps
