// For how long this process was suspended: stopped, or its machine asleep. Two threads look at the clock; one of them
// does nothing else, so that nothing holds it up. If it does not run, no thread of this process does; a thread that
// waits for a lock or for memory is no suspension.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/clock.h"

namespace ps {

// A value; the owner locks.
class Suspensions {
 public:
  // A beat comes often; one that is later than `gap` tells of a suspension.
  Suspensions(std::chrono::nanoseconds gap, TimePoint now) : gap_(gap), last_(now) {}

  // From the thread that does nothing else, and from whoever asks, whichever comes first after a suspension.
  void Beat(TimePoint now) {
    if (now - last_ > gap_) untold_ += now - last_;
    last_ = std::max(last_, now);
  }
  // For how long the process was suspended since this was last asked. Zero: it was not suspended.
  std::chrono::nanoseconds Take(TimePoint now) {
    Beat(now);
    return std::exchange(untold_, std::chrono::nanoseconds(0));
  }

 private:
  const std::chrono::nanoseconds gap_;
  TimePoint last_;
  std::chrono::nanoseconds untold_{0};
};

}  // namespace ps
