// A thread that runs tasks in their order.
#pragma once

#include <pthread.h>

#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "common/sync.h"

namespace ps {

// Thread-safe. Who posts bounds how many tasks wait.
class TaskThread {
 public:
  // `name`, which the system's tools show, is a literal of at most 15 characters.
  explicit TaskThread(const char* name)
      : thread_([this, name] {
          pthread_setname_np(pthread_self(), name);
          Run();
        }) {}
  // Waits for the task that runs; those that wait are dropped.
  ~TaskThread() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void Post(std::function<void()> task) {
    {
      MutexLock lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.NotifyAll();
  }

 private:
  void Run() {
    mutex_.Lock();
    while (true) {
      while (tasks_.empty() && !stopping_) changed_.Wait(mutex_);
      if (stopping_) break;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      mutex_.Unlock();
      task();
      task = nullptr;
      mutex_.Lock();
    }
    mutex_.Unlock();
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace ps
