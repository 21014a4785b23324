// Time, and calls at times: an interface, so that tests decide what time it is.
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
  virtual ~Timer() = default;

  virtual TimePoint now() const = 0;
  // Calls `call` at `when` or soon after, in the order of times. `call` must not block. Returns false if there will be
  // no more calls.
  virtual bool At(TimePoint when, std::function<void()> call) = 0;
};

// Calls on one thread of its own, by the machine's clock.
class ThreadTimer final : public Timer {
 public:
  ThreadTimer() : thread_([this] { Run(); }) {}
  ~ThreadTimer() override { Stop(); }

  TimePoint now() const override { return Now(); }

  // Returns false after Stop, and then calls nothing.
  bool At(TimePoint when, std::function<void()> call) override {
    MutexLock lock(mutex_);
    if (stopping_) return false;
    calls_.emplace(when, std::move(call));
    changed_.NotifyOne();
    return true;
  }

  // Makes the calls that are due, and no others; waits for them.
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
    for (;;) {
      const bool due = !calls_.empty() && calls_.begin()->first <= Now();
      if (due) {
        const std::function<void()> call = std::move(calls_.begin()->second);
        calls_.erase(calls_.begin());
        mutex_.Unlock();
        call();
        mutex_.Lock();
      } else if (stopping_) {
        break;
      } else if (calls_.empty()) {
        changed_.Wait(mutex_);
      } else {
        changed_.WaitUntil(mutex_, calls_.begin()->first);
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
