#include "worker/client/slow_steps.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
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

std::string Told(double seconds) {
  return seconds < 0.1 ? absl::StrFormat("%.2f ms", 1000 * seconds) : absl::StrFormat("%.2f s", seconds);
}

}  // namespace

std::optional<std::string> SlowSteps::Add(const StepReport& step, TimePoint now) {
  const double seconds = SecondsOf(step);
  const bool slow = steps_ >= kFirstSteps && seconds >= kShortestSlowS && seconds > kSlowMedians * median_s_;
  const double median_s = median_s_;
  Keep(seconds);
  if (!slow || (said_at_.has_value() && now - *said_at_ < kSayEvery)) return std::nullopt;
  said_at_ = now;
  return absl::StrCat("step ", step.step, " took ", Told(seconds), ", where the median is ", Told(median_s),
                      ": forward ", Told(step.forward_s), ", backward ", Told(step.backward_s), ", push ",
                      Told(step.push_s), ", wait ", Told(step.wait_s), ", pull ", Told(step.pull_s), ", other ",
                      Told(step.other_s));
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
