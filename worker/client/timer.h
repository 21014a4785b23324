// Calls functions at times, on one thread of its own.
#pragma once

#include <functional>
#include <map>
#include <thread>

#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// Thread-safe.
class Timer {
 public:
  Timer() : thread_([this] { Run(); }) {}
  // Calls nothing any more; waits for a call under way.
  ~Timer() { Stop(); }

  // `call` must not block. Returns false after Stop, and then calls nothing.
  bool At(TimePoint when, std::function<void()> call) {
    MutexLock lock(mutex_);
    if (stopping_) return false;
    calls_.emplace(when, std::move(call));
    changed_.NotifyOne();
    return true;
  }

  void Stop() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.NotifyOne();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    mutex_.Lock();
    while (!stopping_) {
      if (calls_.empty()) {
        changed_.Wait(mutex_);
      } else if (const TimePoint first = calls_.begin()->first; first > Now()) {
        changed_.WaitUntil(mutex_, first);
      } else {
        const std::function<void()> call = std::move(calls_.begin()->second);
        calls_.erase(calls_.begin());
        mutex_.Unlock();
        call();
        mutex_.Lock();
      }
    }
    calls_.clear();
    mutex_.Unlock();
  }

  Mutex mutex_;
  CondVar changed_;
  std::multimap<TimePoint, std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ps
