// What the benchmarks print: a time, the work that was done in it, and its ratio to a baseline of the same run.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/clock.h"

namespace ps {

struct Measurement {
  std::string name;
  double p50_s = 0;
  double p99_s = 0;
  double bytes = 0;  // That have to move in one repeat; GB/s is bytes / p50_s. 0: none, it is a time alone.
  double ratio = 0;  // GB/s over that of the baseline; 0: none.
};

// Percentiles of repeats, by the nearest rank. `seconds` is not empty.
inline Measurement Summarize(const std::string& name, std::vector<double> seconds, double bytes) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double share) {
    return seconds[static_cast<size_t>(std::lround(share * static_cast<double>(seconds.size() - 1)))];
  };
  return {.name = name, .p50_s = at(0.5), .p99_s = at(0.99), .bytes = bytes};
}

inline constexpr int kWarmUp = 3;  // Repeats that are not measured.

template <typename Work>
Measurement Measure(const std::string& name, int repeats, double bytes, Work work) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats + kWarmUp; ++i) {
    const TimePoint began = Now();
    work();
    if (i >= kWarmUp) seconds.push_back(Seconds(Now() - began));
  }
  return Summarize(name, seconds, bytes);
}

}  // namespace ps
