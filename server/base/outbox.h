// What is decided under a lock and done after it is released, in the order in which it was decided and never two at a
// time. So nothing is sent and no client is called under a lock, and locks of two objects never nest.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "common/sync.h"

namespace ps {

// Whether this thread does an action of some outbox.
inline thread_local bool in_outbox = false;

// An action is a value that says what is to be done; its owner does it (`perform`), and says what each action means.
//
// A thread does only so much for others in a row as long as others come: the next who comes takes over. So no thread is
// kept, and nothing is left, since whoever adds an action comes to Drain.
template <typename Action>
class Outbox {
 public:
  using Perform = std::function<void(Action&)>;

  // Actions that a thread does before it hands over.
  static constexpr size_t kMostInARow = 64;

  explicit Outbox(Perform perform) : perform_(std::move(perform)) {}

  // Queues an action. May be called under any lock. Drain is to follow, without it.
  void Add(Action action) {
    MutexLock lock(mutex_);
    actions_.push_back(std::move(action));
  }
  void Add(std::vector<Action> actions) {
    if (actions.empty()) return;
    MutexLock lock(mutex_);
    std::move(actions.begin(), actions.end(), std::back_inserter(actions_));
  }

  // Does what is queued, unless another thread is at it (which then does this too). If that has done its part, this
  // thread waits for the end of the one action that it is at, and takes over. Call it without any lock. A thread that
  // does an action of an outbox, of this one or another, does not wait: the other may be waiting for it in the same
  // way.
  void Drain() {
    mutex_.Lock();
    if (MayDrain()) DoActions();
    mutex_.Unlock();
  }

 private:
  // Whether this thread is to do the actions. It may wait for that.
  bool MayDrain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (has_next_) return false;  // The one that waits does them.
    if (!draining_) return true;
    if (done_ < kMostInARow || in_outbox) return false;
    has_next_ = true;
    while (draining_) ended_.Wait(mutex_);
    has_next_ = false;
    return true;
  }

  void DoActions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    draining_ = true;
    for (done_ = 0; !actions_.empty() && (done_ < kMostInARow || !has_next_); ++done_) {
      std::optional<Action> action = std::move(actions_.front());
      actions_.pop_front();
      mutex_.Unlock();
      const bool was = std::exchange(in_outbox, true);
      perform_(*action);
      action.reset();
      in_outbox = was;
      mutex_.Lock();
    }
    draining_ = false;
    if (has_next_) ended_.NotifyOne();
  }

  const Perform perform_;
  Mutex mutex_;
  CondVar ended_;  // Nobody drains any more, and somebody waits for that.
  std::deque<Action> actions_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  size_t done_ ABSL_GUARDED_BY(mutex_) = 0;        // Actions, by the thread that drains.
  bool has_next_ ABSL_GUARDED_BY(mutex_) = false;  // A thread waits to take over.
};

// Holds the lock to its scope's end, and then drains.
template <typename Action>
class ABSL_SCOPED_LOCKABLE OutboxLock {
 public:
  OutboxLock(Outbox<Action>& outbox, Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex)
      : outbox_(outbox), mutex_(mutex) {
    mutex_.Lock();
  }
  ~OutboxLock() ABSL_UNLOCK_FUNCTION() {
    mutex_.Unlock();
    outbox_.Drain();
  }
  OutboxLock(const OutboxLock&) = delete;
  OutboxLock& operator=(const OutboxLock&) = delete;

 private:
  Outbox<Action>& outbox_;
  Mutex& mutex_;
};

}  // namespace ps
