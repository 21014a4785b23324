// What the benchmarks print: a time, the work that was done in it, and its ratio to a baseline of the same run.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/clock.h"

namespace ps {

struct Measurement {
  std::string name;
  double p50_s = 0;
  double p99_s = 0;
  double p999_s = 0;  // 0: there were too few repeats to tell.
  double bytes = 0;   // That have to move in one repeat; GB/s is bytes / p50_s. 0: none, it is a time alone.
  double ratio = 0;   // GB/s over that of the baseline; 0: none.
};

inline constexpr size_t kFewestForThousandth = 1000;

// Percentiles of repeats, by the nearest rank. `seconds` is not empty.
inline Measurement Summarize(const std::string& name, std::vector<double> seconds, double bytes) {
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double share) {
    return seconds[static_cast<size_t>(std::lround(share * static_cast<double>(seconds.size() - 1)))];
  };
  return {.name = name,
          .p50_s = at(0.5),
          .p99_s = at(0.99),
          .p999_s = seconds.size() >= kFewestForThousandth ? at(0.999) : 0,
          .bytes = bytes};
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

// In turn, so that what else the machine does meets all of them alike. Ratios are to the first.
inline std::vector<Measurement> MeasureInTurn(int repeats, double bytes,
                                              const std::vector<std::function<void()>>& works) {
  std::vector<std::vector<double>> seconds(works.size());
  for (int i = 0; i < repeats + kWarmUp; ++i) {
    for (size_t work = 0; work < works.size(); ++work) {
      const TimePoint began = Now();
      works[work]();
      if (i >= kWarmUp) seconds[work].push_back(Seconds(Now() - began));
    }
  }
  std::vector<Measurement> rows;
  rows.reserve(works.size());
  for (const std::vector<double>& each : seconds) {
    rows.push_back(Summarize("", each, bytes));
    if (rows.size() > 1) rows.back().ratio = rows.front().p50_s / rows.back().p50_s;
  }
  return rows;
}

}  // namespace ps
