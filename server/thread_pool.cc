#include "server/thread_pool.h"

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

void ThreadPool::Post(size_t items, std::function<void(size_t)> work, std::function<void()> done) {
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
    tasks_.push_back(std::move(task));
  }
  if (items > 1) {
    posted_.NotifyAll();
  } else {
    posted_.NotifyOne();
  }
}

std::shared_ptr<ThreadPool::Task> ThreadPool::NextTask() {
  MutexLock lock(mutex_);
  while (tasks_.empty() && !stopping_) posted_.Wait(mutex_);
  return tasks_.empty() ? nullptr : tasks_.front();
}

void ThreadPool::Run() {
  while (const std::shared_ptr<Task> task = NextTask()) Work(task);
}

void ThreadPool::Work(const std::shared_ptr<Task>& task) {
  size_t worked = 0;
  for (size_t item = task->next.fetch_add(1); item < task->items; item = task->next.fetch_add(1)) {
    task->work(item);
    ++worked;
  }
  {
    MutexLock lock(mutex_);
    if (!tasks_.empty() && tasks_.front() == task) tasks_.pop_front();
  }
  if (worked > 0 && task->finished.fetch_add(worked) + worked == task->items) task->done();
}

bool ThreadPool::RunPosted() {
  for (bool worked = false;; worked = true) {
    std::shared_ptr<Task> task;
    {
      MutexLock lock(mutex_);
      if (tasks_.empty()) return worked;
      task = tasks_.front();
    }
    Work(task);
  }
}

}  // namespace ps
