// A thread that runs tasks in their order.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/sync.h"

namespace ps {

// Thread-safe. Who posts bounds how many tasks wait.
class TaskThread {
 public:
  // What becomes of tasks that still wait when the thread is to end.
  enum class AtEnd { kDropsTasks, kDoesTasks };

  // `name`, which the system's tools show, is a literal of at most 15 characters.
  explicit TaskThread(const char* name, AtEnd at_end = AtEnd::kDropsTasks)
      : drops_(at_end == AtEnd::kDropsTasks), thread_([this, name] {
          pthread_setname_np(pthread_self(), name);
          number_ = gettid();
          Run();
        }) {}
  // Waits for the task that runs, and for those that wait where they are not dropped.
  ~TaskThread() {
    EndWithin(std::chrono::nanoseconds(0));
    thread_.join();
  }
  // Tells the thread to end, and returns whether it has ended after this time at most. A task that hangs in the system
  // keeps the thread; then only the process can end.
  bool EndWithin(std::chrono::nanoseconds time) {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    const TimePoint deadline = Now() + time;
    while (!ended_ && Now() < deadline) changed_.WaitUntil(mutex_, deadline);
    return ended_;
  }
  // Since when the task that runs has been at it; nothing: none runs.
  std::optional<TimePoint> busy_since() const {
    MutexLock lock(mutex_);
    return busy_since_;
  }
  // Bytes that its tasks have read and written in files until now; 0 where the system does not count them. Together
  // with busy_since it tells a file system that is slow from one that hangs.
  uint64_t bytes_moved() const {
    // https://man7.org/linux/man-pages/man5/proc_pid_io.5.html: rchar: 323934931, then wchar: 323929600
    std::ifstream counts(absl::StrCat("/proc/self/task/", number_.load(), "/io"));
    std::string name;
    uint64_t read = 0;
    uint64_t written = 0;
    return counts >> name >> read >> name >> written ? read + written : 0;
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void Post(std::function<void()> task) {
    {
      MutexLock lock(mutex_);
      tasks_.push_back(std::move(task));
      if (busy_since_.has_value()) return;  // It looks for the next by itself.
    }
    changed_.NotifyAll();
  }

 private:
  void Run() {
    mutex_.Lock();
    while (true) {
      while (tasks_.empty() && !stopping_) changed_.Wait(mutex_);
      if (stopping_ && (drops_ || tasks_.empty())) break;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_since_ = Now();
      mutex_.Unlock();
      task();
      task = nullptr;
      mutex_.Lock();
      busy_since_.reset();
    }
    ended_ = true;
    changed_.NotifyAll();
    mutex_.Unlock();
  }

  const bool drops_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<TimePoint> busy_since_ ABSL_GUARDED_BY(mutex_);
  std::atomic<pid_t> number_ = 0;  // The thread's, by which the system knows it.
  std::thread thread_;             // Last: it uses the others.
};

}  // namespace ps
