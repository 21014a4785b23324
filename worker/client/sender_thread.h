// A thread that passes gradients on, so that whoever computes them need not.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "common/sync.h"

namespace ps {

// Thread-safe. What is posted is done in order, before its end.
class SenderThread {
 public:
  SenderThread() : thread_([this] { Run(); }) {}
  ~SenderThread() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  SenderThread(const SenderThread&) = delete;
  SenderThread& operator=(const SenderThread&) = delete;

  // Bounded by its callers: a tensor of an exchange is posted once.
  void Post(std::function<void()> work) {
    {
      MutexLock lock(mutex_);
      work_.push_back(std::move(work));
      if (!idle_) return;
    }
    changed_.NotifyOne();
  }

 private:
  void Run() {
    MutexLock lock(mutex_);
    for (;;) {
      idle_ = true;
      while (work_.empty() && !stopping_) changed_.Wait(mutex_);
      idle_ = false;
      if (work_.empty()) return;
      const std::function<void()> next = std::move(work_.front());
      work_.pop_front();
      mutex_.Unlock();
      next();
      mutex_.Lock();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  bool idle_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace ps
