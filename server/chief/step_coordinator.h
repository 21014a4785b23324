// What a chief does for a mode where several shards must apply the same contributions: shards report the pushes that
// are complete on them, and it names the sets that make each step, once every shard has every push of them. Weights and
// gradients never pass through it.
//
// Pure: no locks, no I/O, no clock; its owner passes the time in. It counts identities, never messages: what is told
// twice counts once.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "server/chief/membership.h"
#include "server/modes/mode.h"

namespace ps {

class StepCoordinator {
 public:
  // The mode's own instance of the chief.
  StepCoordinator(std::unique_ptr<Mode> mode, uint32_t num_shards) : mode_(std::move(mode)), num_shards_(num_shards) {}

  const Mode& mode() const { return *mode_; }

  // Whether it names sets at all. Else each shard decides for itself, and what shards complete changes nothing here.
  bool leads() const { return mode_->led(num_shards_); }

  // Begins at this version, with a checkpoint.
  void Restore(uint64_t version);
  // A view with these members. Where the mode counts a push for its owner alone, undecided ones of other owners are
  // forgotten. Returns the sets that are named by it, in order.
  std::vector<StepSet> OnView(const Membership& members, TimePoint now);

  struct Outcome {
    bool news = false;             // The report was not known yet, and is still of use.
    std::vector<StepSet> decided;  // The sets that are named by it, in order.
  };
  // The push, whose `at` is now, is complete on the shard; its version is not used.
  Outcome Complete(uint32_t shard, uint64_t incarnation, const PushHeader& push, const Membership& members);
  // These ranks' workers have nothing to push until they get more work.
  std::vector<StepSet> SetIdle(const std::set<uint32_t>& ranks, TimePoint now);
  // The sets that have waited for long enough.
  std::vector<StepSet> Tick(TimePoint now);

  // The ranks that a set waits for, ascending, of which no shard has the push, or else some have not; none if no push
  // has come, if those that have are enough, or if there is a shard that has none of them.
  std::vector<uint32_t> Missing() const;
  // "step 3: the push of rank 1 is not complete on shard 2", for the first push that some shards have and others have
  // not; empty if there is none.
  std::string Incomplete() const;

 private:
  using Push = std::pair<uint64_t, uint32_t>;  // Step and rank.
  struct Partial {
    uint64_t incarnation = 0;          // 0: of any.
    std::vector<bool> shards;          // Those that have it,
    uint32_t count = 0;                // and how many they are.
    std::chrono::nanoseconds took{0};  // The longest that it took to come to one of them.
  };

  // The mode moves on by these sets. Then the windows that are open are looked at.
  std::vector<StepSet> Decide(std::vector<StepSet> sets, TimePoint now);
  // Forgets what the set is made of, and what can be in no set any more.
  void Forget(const StepSet& decided);

  const std::unique_ptr<Mode> mode_;
  const uint32_t num_shards_;
  // Pushes that no set was named with: of some shards, and, each with its incarnation, of all.
  std::map<Push, Partial> partial_;
  std::map<Push, uint64_t> complete_;
  std::set<uint32_t> idle_;
  std::map<uint64_t, TimePoint> windows_;  // Since when each is open, by number.
};

}  // namespace ps
