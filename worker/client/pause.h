// A thread that waits for a time, and for nothing else.
#pragma once

#include <stop_token>

#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// Returns at `when`, or as soon as a stop is requested.
inline void PauseUntil(TimePoint when, const std::stop_token& stop = {}) {
  Mutex mutex;
  CondVar changed;
  const std::stop_callback wake(stop, [&] {
    const MutexLock lock(mutex);
    changed.NotifyAll();
  });
  const MutexLock lock(mutex);
  while (!stop.stop_requested() && changed.WaitUntil(mutex, when)) continue;
}

}  // namespace ps
