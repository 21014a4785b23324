// How long a round of diloco may wait for more pushes once its quorum is there, where that is found out
// (--quorum_grace=auto).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/clock.h"

namespace ps {

// Workers train on for `overlap` batches after a push before they need weights. What of that time neither the quorum
// nor the exchange needs, by exponential averages of recent rounds, costs nobody anything:
//
//   overlap × time of a batch − from a round's first push to its quorum − exchange, at least 0
//
// The time of a batch is that of the fastest worker, which would be idle first: what is between two of its pushes, by
// the batches. Where it had to wait that is too long a time, but by less than the wait, since the overlap is less than
// the batches between two pushes: so the wait gets shorter from round to round. An exchange takes twice as long as a
// push took to come. Source: Decoupled DiLoCo, 2026 (arXiv:2604.21428).
//
// A value without a clock: times come with the events.
class AutomaticGrace {
 public:
  // `steps` batches are between two pushes of a worker, `overlap` between a push and the weights.
  AutomaticGrace(uint32_t num_workers, uint32_t steps, uint32_t overlap)
      : steps_(steps), overlap_(overlap), ranks_(num_workers) {}

  // The rank's push was complete at this time; from its first byte to its last it took so long.
  void Arrived(uint32_t rank, TimePoint at, std::chrono::nanoseconds took) {
    Rank& known = ranks_[rank];
    if (known.last.has_value()) Average(Seconds(at - *known.last) / steps_, known.batch);
    known.last = at;
    Average(2 * Seconds(took), exchange_);
  }
  // The rank's worker is gone, replaced or done.
  void Left(uint32_t rank) { ranks_[rank] = {}; }
  // A round's quorum was there so long after its first push.
  void QuorumAfter(std::chrono::nanoseconds wait) { Average(Seconds(wait), quorum_); }

  std::chrono::nanoseconds length() const {
    std::optional<double> batch;
    for (const Rank& rank : ranks_) {
      if (rank.batch.has_value()) batch = std::min(batch.value_or(*rank.batch), *rank.batch);
    }
    const double left = overlap_ * batch.value_or(0) - quorum_.value_or(0) - exchange_.value_or(0);
    if (left < kLeast) return std::chrono::nanoseconds(0);
    return std::chrono::nanoseconds(static_cast<int64_t>(std::min(left, kMost) * 1e9));
  }

 private:
  static constexpr double kNewest = 0.25;  // The weight of the newest value in an average.
  static constexpr double kLeast = 0.05;   // Seconds. Windows are looked at as rarely: a shorter one would last longer.
  static constexpr double kMost = 60;      // After a pause of the whole machine averages are far off.

  struct Rank {
    std::optional<TimePoint> last;
    std::optional<double> batch;
  };
  static double Seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }
  static void Average(double value, std::optional<double>& average) {
    average = average.has_value() ? *average + kNewest * (value - *average) : value;
  }

  const double steps_;
  const double overlap_;
  std::vector<Rank> ranks_;
  std::optional<double> exchange_;
  std::optional<double> quorum_;
};

}  // namespace ps
