#include "common/local/message_ring.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

using Length = uint32_t;
constexpr size_t kAlignment = 8;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

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

RingBytes::RingBytes(std::span<uint8_t> memory)
    : header_(reinterpret_cast<MessageRing*>(memory.data())), data_(memory.subspan(sizeof(MessageRing))) {
  Check(reinterpret_cast<uintptr_t>(memory.data()) % alignof(MessageRing) == 0, "a ring begins at a cache line");
  Check(!data_.empty() && data_.size() % kAlignment == 0, "a ring has a multiple of 8 bytes");
}

void RingBytes::CopyIn(uint64_t at, const void* from, size_t size) const {
  const size_t begin = at % data_.size();
  const size_t before_end = std::min(size, data_.size() - begin);
  std::memcpy(data_.data() + begin, from, before_end);
  std::memcpy(data_.data(), static_cast<const uint8_t*>(from) + before_end, size - before_end);
}

void RingBytes::CopyOut(uint64_t at, void* to, size_t size) const {
  const size_t begin = at % data_.size();
  const size_t before_end = std::min(size, data_.size() - begin);
  std::memcpy(to, data_.data() + begin, before_end);
  std::memcpy(static_cast<uint8_t*>(to) + before_end, data_.data(), size - before_end);
}

absl::Status MessageWriter::Write(std::string_view message) {
  const uint64_t read = ring_.header().read.load(std::memory_order_acquire);
  const uint64_t held = written_ - read;  // Also if `read` is absurd, this is a number that is compared, and no index.
  if (held > ring_.capacity()) return absl::InternalError("the reader of a message ring has read what was not written");
  const size_t needed = sizeof(Length) + message.size();
  if (message.size() > ring_.capacity() || RoundUp(needed) > ring_.capacity() - held) {
    return ResourceExhausted("no room for a message of ", message.size(), " bytes in a ring of ", ring_.capacity(),
                             " of which ", held, " are taken");
  }
  const auto length = static_cast<Length>(message.size());
  ring_.CopyIn(written_, &length, sizeof(length));
  ring_.CopyIn(written_ + sizeof(length), message.data(), message.size());
  written_ += RoundUp(needed);
  ring_.header().written.store(written_, std::memory_order_release);
  Ring(ring_.header().bell, event_);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> MessageReader::Read() {
  const uint64_t written = ring_.header().written.load(std::memory_order_acquire);
  const uint64_t held = written - read_;
  if (held == 0) return std::nullopt;
  Length length = 0;
  if (held <= ring_.capacity() && held >= sizeof(length)) ring_.CopyOut(read_, &length, sizeof(length));
  const size_t needed = RoundUp(sizeof(length) + length);
  if (held > ring_.capacity() || needed > held) {
    return absl::InternalError("the writer of a message ring has broken its rules");
  }
  std::string message(length, '\0');
  ring_.CopyOut(read_ + sizeof(length), message.data(), length);
  read_ += needed;
  ring_.header().read.store(read_, std::memory_order_release);
  return message;
}

// Each side writes its word before it reads the other's: either the waiter sees the ring, or the ringer that it sleeps.
// A descriptor is written to once for each sleep: nobody reads it (epoll's edges tell), and it never blocks.
void Ring(Doorbell& bell, int event) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleeping.load(std::memory_order_seq_cst) == 0) return;
  if (event < 0) {
    syscall(SYS_futex, Word(bell.rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  } else if (bell.sleeping.exchange(0) != 0) {
    eventfd_write(event, 1);
  }
}

bool Looking::Again() {
  if (looks_ < kPauses) {
    ++looks_;
    Pause();
    return true;
  }
  rested_ = rests_ > 0;
  if (rested_ || looks_ >= kPauses + yields_) return false;
  ++looks_;
  const TimePoint began = Now();
  sched_yield();
  GaveWay(Now() - began);
  return true;
}

void Looking::GaveWay(std::chrono::nanoseconds time) {
  if (time <= kLongYield) return;
  rests_ = next_rests_;
  next_rests_ = std::min(2 * next_rests_, kMostRests);
}

void Looking::End(bool came) {
  if (rested_) {
    --rests_;
  } else if (looks_ > kPauses && rests_ == 0) {
    next_rests_ = std::max(next_rests_ / 2, kFewestRests);
  }
  rested_ = false;
  looks_ = 0;
  yields_ = came ? kMostYields : std::max(yields_ / 4, kFewestYields);
}

// The bell is read after the flag is set, as where a reader sleeps on it: what rang before is then seen here.
void MessageReader::SetSleeping(bool sleeps) {
  Doorbell& bell = ring_.header().bell;
  bell.sleeping.store(sleeps ? 1 : 0, std::memory_order_seq_cst);
  (void)bell.rings.load(std::memory_order_seq_cst);
}

bool MessageReader::Rung() {
  const uint32_t rings = ring_.header().bell.rings.load(std::memory_order_seq_cst);
  if (rings == seen_) return false;
  seen_ = rings;
  return true;
}

bool MessageReader::Sleep(TimePoint deadline) {
  Doorbell& bell = ring_.header().bell;
  bell.sleeping.store(1, std::memory_order_seq_cst);
  bool rung = Rung();
  while (!rung && Now() < deadline) {
    SleepWhile(bell.rings, seen_, deadline);
    rung = Rung();
  }
  bell.sleeping.store(0, std::memory_order_relaxed);
  return rung;
}

bool MessageReader::Wait(TimePoint deadline) {
  bool rung = Rung();
  while (!rung && looking_.Again()) rung = Rung();
  if (!rung) rung = Sleep(deadline);
  looking_.End(rung);
  return rung;
}

}  // namespace ps
