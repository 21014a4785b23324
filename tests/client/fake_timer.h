// A timer whose time is the test's.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "worker/client/timer.h"

namespace ps {

class FakeTimer final : public Timer {
 public:
  TimePoint now() const override {
    MutexLock lock(mutex_);
    return now_;
  }
  bool At(TimePoint when, std::function<void()> call) override {
    MutexLock lock(mutex_);
    if (stopped_) return false;
    calls_.emplace(when, std::move(call));
    return true;
  }

  // Makes the calls that are due by then, each at its own time.
  void Advance(std::chrono::nanoseconds time) {
    const TimePoint end = now() + time;
    for (;;) {
      std::function<void()> call;
      {
        MutexLock lock(mutex_);
        if (calls_.empty() || calls_.begin()->first > end) {
          now_ = end;
          return;
        }
        now_ = std::max(now_, calls_.begin()->first);
        call = std::move(calls_.begin()->second);
        calls_.erase(calls_.begin());
      }
      call();
    }
  }
  void RunDue() { Advance({}); }
  // Takes no more calls.
  void Stop() {
    MutexLock lock(mutex_);
    stopped_ = true;
  }

 private:
  mutable Mutex mutex_;
  TimePoint now_ ABSL_GUARDED_BY(mutex_) = TimePoint(std::chrono::hours(1));
  std::multimap<TimePoint, std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ps
