#include "worker/client/slow_steps.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "worker/client/training_report.h"

namespace ps {
namespace {

constexpr size_t kSteps = 100;
constexpr uint64_t kFirstSteps = 20;
constexpr uint64_t kMedianEvery = 10;
constexpr double kSlowMedians = 10;
constexpr double kShortestSlowS = 0.1;
constexpr std::chrono::seconds kSayEvery(10);

}  // namespace

std::optional<std::string> SlowSteps::Add(const StepReport& step, TimePoint now) {
  const double seconds = SecondsOf(step);
  const bool slow = steps_ >= kFirstSteps && seconds >= kShortestSlowS && seconds > kSlowMedians * median_s_;
  const double median_s = median_s_;
  Keep(seconds);
  if (!slow || (said_at_.has_value() && now - *said_at_ < kSayEvery)) return std::nullopt;
  said_at_ = now;
  return absl::StrFormat(
      "step %d took %.3g s, where the median is %.3g s: forward %.3g s, backward %.3g s, push %.3g s, wait %.3g s, "
      "pull %.3g s, other %.3g s",
      step.step, seconds, median_s, step.forward_s, step.backward_s, step.push_s, step.wait_s, step.pull_s,
      step.other_s);
}

void SlowSteps::Keep(double seconds) {
  if (last_.size() < kSteps) {
    last_.push_back(seconds);
  } else {
    last_[steps_ % kSteps] = seconds;
  }
  ++steps_;
  if (steps_ % kMedianEvery != 0) return;
  std::vector<double> sorted = last_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  median_s_ = *middle;
}

}  // namespace ps
