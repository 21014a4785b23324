#include "common/local/doorbell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace ps {
namespace {

constexpr int kPauses = 20;  // Before it lets others run.

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t* Word(std::atomic<uint32_t>& word) { return reinterpret_cast<uint32_t*>(&word); }

// Sleeps while the word has this value, until it is woken, a signal comes or the deadline.
void SleepWhile(std::atomic<uint32_t>& word, uint32_t value, TimePoint deadline) {
  const auto since_boot = std::chrono::nanoseconds(deadline.time_since_epoch()).count();  // CLOCK_MONOTONIC's.
  const timespec until = {.tv_sec = since_boot / 1'000'000'000, .tv_nsec = since_boot % 1'000'000'000};
  syscall(SYS_futex, Word(word), FUTEX_WAIT_BITSET, value, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

// Each side writes its word before it reads the other's: either the waiter sees the ring, or the ringer that it sleeps.
void Ring(Doorbell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleeping.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, Word(bell.rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool DoorbellWaiter::Rung() {
  const uint32_t rings = bell_.rings.load(std::memory_order_seq_cst);
  if (rings == seen_) return false;
  seen_ = rings;
  return true;
}

bool DoorbellWaiter::Look() {
  for (int look = 0; look < kPauses; ++look) {
    if (Rung()) return true;
    Pause();
  }
  for (int look = 0; look < yields_; ++look) {
    if (Rung()) return true;
    sched_yield();
  }
  return false;
}

bool DoorbellWaiter::Sleep(TimePoint deadline) {
  bell_.sleeping.store(1, std::memory_order_seq_cst);
  bool rung = Rung();
  while (!rung && Now() < deadline) {
    SleepWhile(bell_.rings, seen_, deadline);
    rung = Rung();
  }
  bell_.sleeping.store(0, std::memory_order_relaxed);
  return rung;
}

bool DoorbellWaiter::Wait(TimePoint deadline) {
  const bool rung = Look() || Sleep(deadline);
  yields_ = rung ? kMostYields : std::max(yields_ / 4, kFewestYields);
  return rung;
}

}  // namespace ps
