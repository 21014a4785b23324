// Messages from one process of this host to another, in memory that both share: a ring of bytes with one writer and one
// reader, each with a count of the bytes that it has passed.
//
// Neither side trusts the other: a side keeps its own count to itself and only publishes it; the other's is checked
// before it is used, and a message is copied out before it is looked at. A peer that breaks the rules is an error here,
// never a read or write elsewhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"

namespace ps {

// How a process of this host tells another that there is something to look at: a counter in memory that both share.
//
// Whoever waits looks for a while before it sleeps (futex(2)), and lets other threads run meanwhile: to be woken costs
// a processor that has gone idle 50 us and more. If nothing came the last time it hardly looks, so an idle process
// burns no core. The other side may be hostile: it can wake this one for nothing, or not at all, but no wait is longer
// than its deadline.
//
// A side that waits for several rings at once, and for sockets, sleeps in epoll(7) instead: then it is woken by writing
// to a descriptor (eventfd(2)) that the other side has of it.
//
// Lies in shared memory, all zero at first. Rung by one process and awaited by one thread of the other.
struct Doorbell {
  std::atomic<uint32_t> rings = 0;
  std::atomic<uint32_t> sleeping = 0;  // The waiting side sleeps, or is about to.
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share these");

// What was written before is seen by whoever then sees the ring. `event`: what wakes the other side; negative: the
// bell.
void Ring(Doorbell& bell, int event = -1);

// How long to look for something before sleeping: longer if something came the last time, and not at all for a while
// where another thread that computes has taken the processor meanwhile. Whoever sleeps takes nothing from that one, and
// is given the processor sooner.
class Looking {
 public:
  // Lets others run for a moment. False: it is time to sleep.
  bool Again();
  // Looking, or the sleep after it, is over: something came, or not.
  void End(bool came);
  // Others have had the processor for so long, in a moment that Again gave them.
  void GaveWay(std::chrono::nanoseconds time);

 private:
  // Those who look as well, or build a little, give way sooner.
  static constexpr std::chrono::microseconds kLongYield{200};
  static constexpr int kFewestRests = 8;
  static constexpr int kMostRests = 256;
  static constexpr int kPauses = 20;        // Before it lets others run.
  static constexpr int kMostYields = 2000;  // About a millisecond, if nobody else wants to run.
  static constexpr int kFewestYields = 4;

  int looks_ = 0;
  int yields_ = kMostYields;  // The next time.
  int rests_ = 0;             // So many times it does not look before it sleeps.
  bool rested_ = false;       // This time it has not.
  int next_rests_ = kFewestRests;
};

// Where the ring lies: this header, then its bytes. All zero at first.
struct MessageRing {
  alignas(64) std::atomic<uint64_t> written = 0;  // By the writer, as is `read` by the reader.
  alignas(64) std::atomic<uint64_t> read = 0;
  alignas(64) Doorbell bell;  // Rung for the reader, after a message.

  // The bytes of memory that a ring takes for so many bytes of messages, each of which takes up to 11 more.
  static constexpr size_t SizeFor(size_t capacity) { return sizeof(MessageRing) + capacity; }
};

// A ring in this memory, which begins at a cache line and has a multiple of 8 bytes after the header.
class RingBytes {
 public:
  explicit RingBytes(std::span<uint8_t> memory);
  MessageRing& header() const { return *header_; }
  size_t capacity() const { return data_.size(); }
  // The bytes begin at this count, and go on around the end.
  void CopyIn(uint64_t at, const void* from, size_t size) const;
  void CopyOut(uint64_t at, void* to, size_t size) const;

 private:
  MessageRing* header_;
  std::span<uint8_t> data_;
};

// Used by one thread at a time.
class MessageWriter {
 public:
  // `event` is Ring's, and outlives it.
  explicit MessageWriter(std::span<uint8_t> memory, int event = -1) : ring_(memory), event_(event) {}

  // Publishes the message, and rings. RESOURCE_EXHAUSTED: there is no room for it until the reader has read more (or
  // never, where it is larger than the ring); INTERNAL: the reader has broken the rules. Then nothing is written.
  absl::Status Write(std::string_view message);

 private:
  const RingBytes ring_;
  const int event_;
  uint64_t written_ = 0;
};

// Used by one thread at a time.
class MessageReader {
 public:
  explicit MessageReader(std::span<uint8_t> memory) : ring_(memory) {}

  // The next message, if there is one. INTERNAL: the writer has broken the rules; it has from then on.
  absl::StatusOr<std::optional<std::string>> Read();
  // There is none now.
  bool empty() const { return ring_.header().written.load(std::memory_order_acquire) == read_; }
  // Waits until the writer's bell, which also rings without a message, has been rung since the last call. False when
  // `deadline` came first. What must not be missed is looked for after the call, not before it: a ring while the caller
  // is at work makes the next call return at once.
  bool Wait(TimePoint deadline);
  // For a reader that sleeps elsewhere: from now on, or no longer, the writer is to wake it. Messages are to be looked
  // for after the first.
  void SetSleeping(bool sleeps);

 private:
  bool Rung();
  bool Sleep(TimePoint deadline);

  const RingBytes ring_;
  uint64_t read_ = 0;
  Looking looking_;
  uint32_t seen_ = 0;  // Rings.
};

}  // namespace ps
