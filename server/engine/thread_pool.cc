#include "server/engine/thread_pool.h"

#include <utility>

namespace ps {

ThreadPool::ThreadPool(int threads) {
  threads_.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

void ThreadPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  posted_.NotifyAll();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void ThreadPool::Add(size_t items, std::function<void(size_t)> work, std::function<void()> done, bool behind) {
  if (items == 0) {  // Nothing to do but to be done, in its turn.
    items = 1;
    work = [](size_t) {};
  }
  auto task = std::make_shared<Task>();
  task->items = items;
  task->work = std::move(work);
  task->done = std::move(done);
  {
    MutexLock lock(mutex_);
    (behind ? behind_ : tasks_).push_back(std::move(task));
  }
  items > 1 && !behind ? posted_.NotifyAll() : posted_.NotifyOne();
}

void ThreadPool::Run() {
  size_t worked = 0;
  while (RunNext(worked, /*waits=*/true)) {
  }
}

bool ThreadPool::RunPosted() {
  size_t worked = 0;
  bool any = false;
  while (RunNext(worked, /*waits=*/false)) any = true;
  return any;
}

bool ThreadPool::RunNext(size_t& worked, bool waits) {
  std::shared_ptr<Task> task;
  {
    MutexLock lock(mutex_);
    while (waits && tasks_.empty() && !may_work_behind() && !stopping_) posted_.Wait(mutex_);
    if (!tasks_.empty()) {
      task = tasks_.front();
    } else if (!may_work_behind()) {
      return false;  // What may still be behind is finished by the thread that is at it.
    }
  }
  if (task != nullptr) {
    Work(task, worked);
  } else {
    WorkBehind();
  }
  return true;
}

void ThreadPool::Work(const std::shared_ptr<Task>& task, size_t& worked) {
  size_t items = 0;
  for (size_t item = task->next.fetch_add(1); item < task->items; item = task->next.fetch_add(1)) {
    task->work(item);
    ++items;
    if (++worked < kItemsBeforeOneBehind) continue;
    worked = 0;
    WorkBehind();
  }
  {
    MutexLock lock(mutex_);
    if (!tasks_.empty() && tasks_.front() == task) tasks_.pop_front();
  }
  if (items > 0 && task->finished.fetch_add(items) + items == task->items) task->done();
}

void ThreadPool::WorkBehind() {
  std::shared_ptr<Task> task;
  {
    MutexLock lock(mutex_);
    if (!may_work_behind()) return;
    works_behind_ = true;
    task = behind_.front();
  }
  const size_t item = task->next.fetch_add(1);
  task->work(item);
  const bool last = item + 1 == task->items;
  if (last) task->done();
  MutexLock lock(mutex_);
  works_behind_ = false;
  if (last) behind_.pop_front();
  // This thread has something else to do now, and another may have slept meanwhile.
  if (!tasks_.empty() && !behind_.empty()) posted_.NotifyOne();
}

}  // namespace ps
