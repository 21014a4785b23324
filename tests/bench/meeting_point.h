// Where threads begin something together, to the microsecond: who waits looks again and again, and lets others run.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "common/sync.h"

namespace ps {

// Thread-safe.
class MeetingPoint {
 public:
  explicit MeetingPoint(uint32_t threads) : missing_(threads), threads_(threads) {}

  // Returns when all that have not left have come.
  void Meet() {
    const uint32_t round = round_;
    Come();
    while (round_ == round) sched_yield();
  }
  // This thread comes no more; those who wait do not wait for it.
  void Leave() {
    {
      MutexLock lock(mutex_);
      --threads_;
    }
    Come();
  }

 private:
  void Come() {
    MutexLock lock(mutex_);
    if (--missing_ > 0) return;
    missing_ = threads_;
    ++round_;
  }

  Mutex mutex_;
  uint32_t missing_ ABSL_GUARDED_BY(mutex_);  // In this round.
  uint32_t threads_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint32_t> round_ = 0;
};

}  // namespace ps
