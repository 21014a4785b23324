// How a process of this host tells another that there is something to look at: a counter in memory that both share.
//
// Whoever waits looks for a while before it sleeps (futex(2)), and lets other threads run meanwhile: to be woken costs
// a processor that has gone idle 50 us and more. If nothing came the last time it hardly looks, so an idle process
// burns no core. The other side may be hostile: it can wake this one for nothing, or not at all, but no wait is longer
// than its deadline.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace ps {

// Lies in shared memory, all zero at first. Rung by one process and awaited by one thread of the other.
struct Doorbell {
  std::atomic<uint32_t> rings = 0;
  std::atomic<uint32_t> sleeping = 0;  // The waiting side sleeps, or is about to.
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share these");

// What was written before is seen by whoever then sees the ring.
void Ring(Doorbell& bell);

// One side's wait for its bell. Used by one thread.
class DoorbellWaiter {
 public:
  // The bell must outlive it.
  explicit DoorbellWaiter(Doorbell& bell) : bell_(bell) {}

  // Waits until the bell has been rung since the last call. False when `deadline` came first. What must not be missed
  // is looked for after the call, not before it: a ring while the caller is at work makes the next call return at once.
  bool Wait(TimePoint deadline);

 private:
  bool Rung();
  bool Look();
  bool Sleep(TimePoint deadline);

  static constexpr int kMostYields = 2000;  // About a millisecond, if nobody else wants to run.
  static constexpr int kFewestYields = 4;

  Doorbell& bell_;
  int yields_ = kMostYields;  // The next time.
  uint32_t seen_ = 0;
};

}  // namespace ps
