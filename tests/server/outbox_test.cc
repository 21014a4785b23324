#include "server/base/outbox.h"

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "tests/catch.h"

namespace ps {
namespace {

const std::chrono::minutes kLong(2);

// Its actions are calls.
using CallOutbox = Outbox<std::function<void()>>;
void MakeCall(std::function<void()>& call) { call(); }

TEST_CASE("Calls are made in their order, and what a call adds is made after it, not in it") {
  CallOutbox outbox{MakeCall};
  std::vector<int> made;
  outbox.Add([&] {
    outbox.Add([&] { made.push_back(3); });
    outbox.Drain();
    made.push_back(1);
  });
  outbox.Add([&] { made.push_back(2); });
  CHECK(made.empty());
  outbox.Drain();
  CHECK(made == std::vector<int>{1, 2, 3});
}

TEST_CASE("A thread that is alone makes all calls, however many") {
  CallOutbox outbox{MakeCall};
  size_t made = 0;
  for (size_t i = 0; i < 10 * CallOutbox::kMostInARow; ++i) outbox.Add([&] { ++made; });
  outbox.Drain();
  CHECK(made == 10 * CallOutbox::kMostInARow);
}

TEST_CASE("A thread that has made its part of calls that never end hands over to the next who comes") {
  CallOutbox outbox{MakeCall};
  const TimePoint deadline = Now() + kLong;
  std::atomic<size_t> made_by_first = 0;
  std::atomic<bool> taken_over = false;
  std::thread::id first_id;
  // Adds itself again for as long as the first thread makes it.
  std::function<void()> call = [&] {
    if (std::this_thread::get_id() != first_id) {
      taken_over = true;
    } else if (++made_by_first; Now() < deadline) {
      outbox.Add(call);
    }
  };
  std::thread first([&] {
    first_id = std::this_thread::get_id();
    outbox.Add(call);
    outbox.Drain();
  });
  while (made_by_first == 0) std::this_thread::yield();
  while (!taken_over && Now() < deadline) outbox.Drain();
  first.join();
  CHECK(taken_over);
  CHECK(made_by_first >= CallOutbox::kMostInARow);
}

TEST_CASE(
    "Many threads at two outboxes that call each other: each call is made once, in order, and nobody waits for ever") {
  constexpr size_t kThreads = 4;
  constexpr size_t kCalls = 5000;
  struct Side {
    CallOutbox outbox{MakeCall};
    Mutex mutex;
    size_t added ABSL_GUARDED_BY(mutex) = 0;
    size_t made = 0;  // One call at a time is made.
    bool in_order = true;
  };
  Side sides[2];
  // An event at one side, that the other is told of.
  std::function<void(size_t, bool)> event = [&](size_t which, bool tells) {
    Side& side = sides[which];
    const OutboxLock lock(side.outbox, side.mutex);
    side.outbox.Add([&side, &event, which, tells, number = side.added++] {
      side.in_order &= side.made++ == number;
      if (tells) event(1 - which, /*tells=*/false);
    });
  };
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&event, t] {
      for (size_t i = 0; i < kCalls; ++i) event((t + i) % 2, /*tells=*/true);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Side& side : sides) {
    CHECK(side.made == kThreads * kCalls);
    CHECK(side.in_order);
  }
}

}  // namespace
}  // namespace ps
