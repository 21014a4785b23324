// For log lines that callers can cause as often as they like: few are written, and the others are counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "common/clock.h"

namespace ps {

// A value; the owner locks.
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
