// How often a value was in each range: of seconds, and of staleness in versions. The ranges are the same everywhere, so
// that what servers tell (v1::Distribution) can be added up, and read without them.
//
// A pure value; its owner locks.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ps/v1/ps.pb.h"

namespace ps {

// Upper bounds, each part of its range; above the last one is another range.
inline constexpr std::array<double, 18> kSecondsBounds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50};
inline constexpr std::array<double, 10> kStalenessBounds = {0, 1, 2, 4, 8, 16, 32, 64, 128, 256};

template <size_t kBounds>
class BasicDistribution {
 public:
  explicit constexpr BasicDistribution(const std::array<double, kBounds>& bounds) : bounds_(&bounds) {}

  // What is below every bound, or not a number, is in the first range.
  void Add(double value) {
    const auto range = std::lower_bound(bounds_->begin(), bounds_->end(), value);
    ++counts_[static_cast<size_t>(range - bounds_->begin())];
    sum_ += value;
  }
  void Add(std::chrono::nanoseconds time) { Add(std::chrono::duration<double>(time).count()); }

  // Of each range, the one above all bounds last.
  std::span<const uint64_t> counts() const { return counts_; }
  double sum() const { return sum_; }
  uint64_t count() const {
    uint64_t count = 0;
    for (const uint64_t each : counts_) count += each;
    return count;
  }

  // Adds what is here to the message, which may be empty.
  void AddTo(v1::Distribution& message) const {
    size_t used = counts_.size();
    while (used > 0 && counts_[used - 1] == 0) --used;
    while (static_cast<size_t>(message.counts_size()) < used) message.add_counts(0);
    for (size_t i = 0; i < used; ++i) {
      message.set_counts(static_cast<int>(i), message.counts(static_cast<int>(i)) + counts_[i]);
    }
    message.set_sum(message.sum() + sum_);
  }

 private:
  const std::array<double, kBounds>* bounds_;
  std::array<uint64_t, kBounds + 1> counts_{};
  double sum_ = 0;
};

// Seconds.
class TimeDistribution : public BasicDistribution<kSecondsBounds.size()> {
 public:
  constexpr TimeDistribution() : BasicDistribution(kSecondsBounds) {}
};

// Versions.
class StalenessDistribution : public BasicDistribution<kStalenessBounds.size()> {
 public:
  constexpr StalenessDistribution() : BasicDistribution(kStalenessBounds) {}
};

// Adds a server's to another's.
inline void Merge(const v1::Distribution& from, v1::Distribution& into) {
  while (into.counts_size() < from.counts_size()) into.add_counts(0);
  for (int i = 0; i < from.counts_size(); ++i) into.set_counts(i, into.counts(i) + from.counts(i));
  into.set_sum(into.sum() + from.sum());
}

}  // namespace ps
