// A few threads that share out the items of one task after another.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "common/sync.h"

namespace ps {

class ThreadPool {
 public:
  // With 0 threads what is posted waits for RunPosted: for tests that choose the order of everything.
  explicit ThreadPool(int threads);
  ~ThreadPool() { Stop(); }

  // Finishes what was posted; what is posted later is never begun.
  void Stop();

  // Calls work(i) once for each i in [0, items), spread over the threads, then done() on the thread that finished last.
  // Does not wait. Tasks are begun in the order in which they were posted.
  void Post(size_t items, std::function<void(size_t)> work, std::function<void()> done);

  // Works on what is posted, on this thread, until nothing is left. Returns whether anything was.
  bool RunPosted();

 private:
  struct Task {
    size_t items;
    std::function<void(size_t)> work;
    std::function<void()> done;
    std::atomic<size_t> next = 0;
    std::atomic<size_t> finished = 0;
  };
  void Run();
  void Work(const std::shared_ptr<Task>& task);
  // The task at the front with items left, or null when stopping.
  std::shared_ptr<Task> NextTask();

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::shared_ptr<Task>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ps
