// Calls that are decided under a lock and made after it is released, in the order in which they were decided and never
// two at a time. So no callback ever runs under a lock of its caller, and locks of two objects never nest.
#pragma once

#include <deque>
#include <functional>
#include <utility>

#include "common/sync.h"

namespace ps {

// A thread makes only so many calls for others in a row as long as others come: the next who comes takes over. So no
// thread is kept, and nothing is left, since whoever adds a call comes to Drain.
class Outbox {
 public:
  // Calls that a thread makes before it hands over.
  static constexpr size_t kMostInARow = 64;

  // Queues a call. May be called under any lock. Drain is to follow, without it.
  void Add(std::function<void()> call) {
    MutexLock lock(mutex_);
    calls_.push_back(std::move(call));
  }

  // Makes the queued calls, unless another thread is at it (which then makes these too). If that has made its part,
  // this thread waits for the end of the one call that it is making, and takes over. Call it without any lock. A thread
  // that is in a call of an outbox, of this one or another, does not wait: the other may be waiting for it in the same
  // way.
  void Drain() {
    mutex_.Lock();
    if (MayDrain()) MakeCalls();
    mutex_.Unlock();
  }

 private:
  // Whether this thread is in a call of any outbox.
  static bool& InCall() {
    thread_local bool in_call = false;
    return in_call;
  }

  // Whether this thread is to make the calls. It may wait for that.
  bool MayDrain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (has_next_) return false;  // The one that waits makes them.
    if (!draining_) return true;
    if (made_ < kMostInARow || InCall()) return false;
    has_next_ = true;
    while (draining_) ended_.Wait(mutex_);
    has_next_ = false;
    return true;
  }

  void MakeCalls() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    draining_ = true;
    for (made_ = 0; !calls_.empty() && (made_ < kMostInARow || !has_next_); ++made_) {
      std::function<void()> call = std::move(calls_.front());
      calls_.pop_front();
      mutex_.Unlock();
      const bool in_call = std::exchange(InCall(), true);
      call();
      call = nullptr;
      InCall() = in_call;
      mutex_.Lock();
    }
    draining_ = false;
    if (has_next_) ended_.NotifyOne();
  }

  Mutex mutex_;
  CondVar ended_;  // Nobody drains any more, and somebody waits for that.
  std::deque<std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  size_t made_ ABSL_GUARDED_BY(mutex_) = 0;        // Calls, by the thread that drains.
  bool has_next_ ABSL_GUARDED_BY(mutex_) = false;  // A thread waits to take over.
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
