// A few threads that share out the items of one task after another, and work on other tasks behind those.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/sync.h"

namespace ps {

class ThreadPool {
 public:
  // A thread works on one item behind the others after so many of them: what is behind goes on, too, but takes little
  // from what is before it.
  static constexpr size_t kItemsBeforeOneBehind = 16;

  // With 0 threads what is posted waits for RunPosted: for tests that choose the order of everything.
  explicit ThreadPool(int threads);
  ~ThreadPool() { Stop(); }

  // Finishes what was posted; what is posted later is never begun.
  void Stop();

  // Calls work(i) once for each i in [0, items), spread over the threads, then done() on the thread that finished last.
  // Does not wait. Tasks are begun in the order in which they were posted.
  void Post(size_t items, std::function<void(size_t)> work, std::function<void()> done) {
    Add(items, std::move(work), std::move(done), /*behind=*/false);
  }

  // The same behind all that Post is given, before and after: by one thread at a time, task after task and item after
  // item, where nothing of Post's is left to begin, and else one item now and then.
  void PostBehind(size_t items, std::function<void(size_t)> work, std::function<void()> done) {
    Add(items, std::move(work), std::move(done), /*behind=*/true);
  }

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
  void Add(size_t items, std::function<void(size_t)> work, std::function<void()> done, bool behind);
  void Run();
  // Does what is next; false: there is nothing, and, if it waits, there will be nothing more. `worked`: the thread's
  // items since it looked behind them.
  bool RunNext(size_t& worked, bool waits);
  // Works on what is left of the task.
  void Work(const std::shared_ptr<Task>& task, size_t& worked);
  bool may_work_behind() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !behind_.empty() && !works_behind_; }
  // Works on one item, unless there is none or another thread is at one.
  void WorkBehind();

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::shared_ptr<Task>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Task>> behind_ ABSL_GUARDED_BY(mutex_);
  bool works_behind_ ABSL_GUARDED_BY(mutex_) = false;  // A thread does.
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace ps
