// Writes lines to a file, a pipe or a terminal without ever blocking the caller, who may hold locks that leases and
// timeouts need.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "common/clock.h"

namespace ps {

// Writes lines to a file descriptor from a thread of its own. The queue is bounded in bytes. Lines past it, and lines
// that the system refuses (a full disk, a pipe that nobody reads any more), are dropped and counted; the count is
// written in their place when writing goes on. Thread-safe.
//
// The descriptor's flags stay as they are, since other processes may share it. Where it blocks, the thread waits until
// a line can be written, and writes no more at once than a pipe takes without waiting. It handles no signals and gets
// no SIGPIPE.
class LineWriter {
 public:
  // What is written in the place of so many dropped lines: a line with its newline. Called under the writer's lock, by
  // any thread; must not block.
  using DroppedLine = std::function<std::string(uint64_t lines)>;

  // Told the first time that the system refuses a line, with errno. Called by the writer's thread.
  using RefusedFunction = std::function<void(int error)>;

  // Takes the descriptor over and closes it in the end.
  LineWriter(int file, size_t max_queued_bytes, DroppedLine dropped_line, RefusedFunction on_refused = nullptr);
  // Flushes for at most 1 s; what is then still queued is lost.
  ~LineWriter();
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Queues a line, which ends with its newline. Never blocks.
  void Write(std::string line);

  // Waits until all that was queued is written, or the deadline has passed: then false.
  bool Flush(TimePoint deadline);

 private:
  // Shared with the thread, which outlives the writer if the system holds it in a write.
  struct State;
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

// For log lines that callers can cause as often as they like: few are written, and the others are counted. A value; the
// owner locks.
class SparingLines {
 public:
  // At most one line in so long a time is written.
  explicit SparingLines(std::chrono::nanoseconds every) : every_(every) {}

  // There is a line to write. If it is to be written: how many were left out before it, which it is to say. Nothing: it
  // is left out.
  std::optional<uint64_t> Admit(TimePoint now) {
    if (now < next_at_) {
      ++left_out_;
      return std::nullopt;
    }
    next_at_ = now + every_;
    return std::exchange(left_out_, 0);
  }
  // For whoever looks now and then, and writes a line if it is not zero: how many were left out since the last line,
  // once its time is over. So they are told also where no other line follows.
  uint64_t TakeLeftOut(TimePoint now) {
    if (left_out_ == 0 || now < next_at_) return 0;
    next_at_ = now + every_;
    return std::exchange(left_out_, 0);
  }

 private:
  const std::chrono::nanoseconds every_;
  TimePoint next_at_;
  uint64_t left_out_ = 0;
};

}  // namespace ps
