// Finds steps that took far longer than a worker's others. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "ps/client.h"

namespace ps {

// A step is slow that took more than ten times the median of the last hundred, and at least 0.1 s: what is shorter
// holds nobody up. A worker's first twenty steps are never slow, since they are when everything is made.
class SlowSteps {
 public:
  // After each step: what is to be said of it, with where its time went; nothing if it is not slow, or if another one
  // was less than ten seconds ago. Costs less than a microsecond on the average.
  std::optional<std::string> Add(const StepReport& step, TimePoint now);

 private:
  void Keep(double seconds);

  std::vector<double> last_;  // The seconds of the last steps: a ring.
  uint64_t steps_ = 0;
  double median_s_ = 0;  // Looked for anew every few steps.
  std::optional<TimePoint> said_at_;
};

}  // namespace ps
