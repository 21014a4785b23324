#include "server/engine/thread_pool.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "tests/catch.h"

namespace ps::thread_pool_test {
namespace {

// Posts tasks that write down what they do.
class Record {
 public:
  void Post(ThreadPool& pool, const std::string& name, size_t items) { pool.Post(items, Work(name), Done(name)); }
  void PostBehind(ThreadPool& pool, const std::string& name, size_t items) {
    pool.PostBehind(items, Work(name), Done(name));
  }
  std::vector<std::string> Take() {
    MutexLock lock(mutex_);
    return std::exchange(written_, {});
  }

 private:
  std::function<void(size_t)> Work(const std::string& name) {
    return [this, name](size_t item) { Write(absl::StrCat(name, item)); };
  }
  std::function<void()> Done(const std::string& name) {
    return [this, name] { Write(absl::StrCat(name, " done")); };
  }
  void Write(std::string what) {
    MutexLock lock(mutex_);
    written_.push_back(std::move(what));
  }

  Mutex mutex_;
  std::vector<std::string> written_ ABSL_GUARDED_BY(mutex_);
};

using Written = std::vector<std::string>;

TEST_CASE("What is posted behind is worked on after the rest, whichever came first, in its own order") {
  ThreadPool pool(0);
  Record record;
  CHECK_FALSE(pool.RunPosted());
  record.PostBehind(pool, "hash", 2);
  record.PostBehind(pool, "second hash", 0);
  record.Post(pool, "update", 2);
  CHECK(pool.RunPosted());
  CHECK(record.Take() ==
        Written{"update0", "update1", "update done", "hash0", "hash1", "hash done", "second hash done"});
  CHECK_FALSE(pool.RunPosted());
}

TEST_CASE("What is behind goes on when the rest has no end, one item after so many of the others") {
  ThreadPool pool(0);
  Record record;
  record.PostBehind(pool, "hash", 2);
  for (int task = 0; task < 4; ++task) record.Post(pool, "update", ThreadPool::kItemsBeforeOneBehind / 2 + 1);
  pool.RunPosted();
  const Written written = record.Take();
  const auto place = [&](const std::string& what) {
    return static_cast<size_t>(std::find(written.begin(), written.end(), what) - written.begin());
  };
  // Before the first of them the end of one update was written, before the second those of three, and the first.
  CHECK(place("hash0") == ThreadPool::kItemsBeforeOneBehind + 1);
  CHECK(place("hash1") == 2 * ThreadPool::kItemsBeforeOneBehind + 4);
  CHECK(written.back() == "update done");
}

TEST_CASE("However many threads there are, one at a time works behind the others, and all is done before the end") {
  constexpr size_t kTasks = 50;
  constexpr size_t kItems = 40;
  std::atomic<size_t> at_once = 0;
  std::atomic<size_t> most = 0;
  std::atomic<size_t> behind = 0;
  std::atomic<size_t> before = 0;
  std::atomic<size_t> done = 0;
  const auto one_behind = [&](size_t /*item*/) {
    const size_t now = at_once.fetch_add(1) + 1;
    size_t seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::yield();
    ++behind;
    --at_once;
  };
  {
    ThreadPool pool(4);
    for (size_t task = 0; task < kTasks; ++task) {
      pool.PostBehind(kItems, one_behind, [&] { ++done; });
      pool.Post(
          kItems, [&](size_t /*item*/) { ++before; }, [&] { ++done; });
      pool.Post(
          1, [&](size_t /*item*/) { ++before; }, [&] { ++done; });
    }
  }
  CHECK(most == 1);
  CHECK(behind == kTasks * kItems);
  CHECK(before == kTasks * (kItems + 1));
  CHECK(done == 3 * kTasks);
}

TEST_CASE("A thread that is held up by what is before leaves what is behind to another") {
  ThreadPool pool(2);
  Mutex mutex;
  CondVar changed;
  bool hashed = false;
  bool released = false;
  const TimePoint deadline = Now() + std::chrono::minutes(2);
  // Ends when all of what is behind is done, which the other thread has to do.
  pool.Post(
      1,
      [&](size_t /*item*/) {
        MutexLock lock(mutex);
        while (!hashed && changed.WaitUntil(mutex, deadline)) {
        }
        released = hashed;
      },
      [] {});
  pool.PostBehind(
      100, [](size_t /*item*/) {},
      [&] {
        {
          MutexLock lock(mutex);
          hashed = true;
        }
        changed.NotifyAll();
      });
  pool.Stop();
  CHECK(released);
}

}  // namespace
}  // namespace ps::thread_pool_test
