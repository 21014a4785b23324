// Calls that are decided under a lock and made after it is released, in the order in which they were decided and never
// two at a time. So no callback ever runs under a lock of its caller, and locks of two objects never nest.
#pragma once

#include <deque>
#include <functional>
#include <utility>

#include "common/sync.h"

namespace ps {

class Outbox {
 public:
  // Queues a call. May be called under any lock.
  void Add(std::function<void()> call) {
    MutexLock lock(mutex_);
    calls_.push_back(std::move(call));
  }

  // Makes the queued calls, unless another thread is at it (which then makes these too). Call it without any lock.
  void Drain() {
    mutex_.Lock();
    if (!draining_) {
      draining_ = true;
      while (!calls_.empty()) {
        std::function<void()> call = std::move(calls_.front());
        calls_.pop_front();
        mutex_.Unlock();
        call();
        call = nullptr;
        mutex_.Lock();
      }
      draining_ = false;
    }
    mutex_.Unlock();
  }

 private:
  Mutex mutex_;
  std::deque<std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

// Drains at the end of its scope. Declare it before the lock, so that the lock is released first.
class OutboxDrain {
 public:
  explicit OutboxDrain(Outbox& outbox) : outbox_(outbox) {}
  ~OutboxDrain() { outbox_.Drain(); }
  OutboxDrain(const OutboxDrain&) = delete;
  OutboxDrain& operator=(const OutboxDrain&) = delete;

 private:
  Outbox& outbox_;
};

// Holds the lock to its scope's end, and then drains.
class ABSL_SCOPED_LOCKABLE OutboxLock {
 public:
  OutboxLock(Outbox& outbox, Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : outbox_(outbox), mutex_(mutex) {
    mutex_.Lock();
  }
  ~OutboxLock() ABSL_UNLOCK_FUNCTION() {
    mutex_.Unlock();
    outbox_.Drain();
  }
  OutboxLock(const OutboxLock&) = delete;
  OutboxLock& operator=(const OutboxLock&) = delete;

 private:
  Outbox& outbox_;
  Mutex& mutex_;
};

}  // namespace ps
