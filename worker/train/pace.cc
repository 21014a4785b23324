#include "worker/train/pace.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/problems.h"
#include "common/random.h"
#include "common/status.h"
#include "common/sync.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

constexpr double kMaxFactor = 1e6;
constexpr absl::Duration kMaxStepTime = absl::Hours(1);

// FIRST:FACTOR
template <typename First, typename Parse>
bool ParsePair(const std::string& text, Parse parse, First& first, double& factor) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  return parts.size() == 2 && parse(parts[0], &first) && absl::SimpleAtod(parts[1], &factor) && factor >= 1 &&
         factor <= kMaxFactor;
}

}  // namespace

absl::StatusOr<std::optional<PaceOptions::Straggler>> ParseStraggler(const std::string& text) {
  if (text.empty()) return std::nullopt;
  PaceOptions::Straggler read;
  const auto parse = [](const std::string& part, uint32_t* rank) { return absl::SimpleAtoi(part, rank); };
  if (ParsePair(text, parse, read.rank, read.factor)) return read;
  return InvalidArgument("--experiment_straggler=", text, ": expected RANK:FACTOR with a factor of 1 to ", kMaxFactor,
                         ", as in 3:4");
}

absl::StatusOr<std::optional<PaceOptions::Delays>> ParseDelays(const std::string& text) {
  if (text.empty()) return std::nullopt;
  PaceOptions::Delays read;
  const auto parse = [](const std::string& part, double* share) { return absl::SimpleAtod(part, share); };
  if (ParsePair(text, parse, read.share, read.factor) && read.share >= 0 && read.share <= 1) return read;
  return InvalidArgument("--experiment_delays=", text,
                         ": expected SHARE:FACTOR with a share of 0 to 1 and a factor of 1 to ", kMaxFactor,
                         ", as in 0.05:10");
}

absl::Status ValidatePace(const PaceOptions& options) {
  Problems problems;
  problems.CheckRange("experiment_step_time", options.step_time, absl::ZeroDuration(), kMaxStepTime);
  const bool idles = options.step_time > absl::ZeroDuration();
  problems.Check(idles || !options.straggler.has_value(),
                 "--experiment_straggler: has no effect without --experiment_step_time");
  problems.Check(idles || !options.delays.has_value(),
                 "--experiment_delays: has no effect without --experiment_step_time");
  return problems.ToStatus();
}

Pace::Pace(const PaceOptions& options, uint64_t seed, uint32_t rank, std::stop_token stop)
    : options_(options), rank_(rank), stop_(std::move(stop)), random_(MakeRandom(seed, kPaceStream + rank)) {}

absl::Duration Pace::Next() {
  absl::Duration time = options_.step_time;
  if (options_.straggler.has_value() && options_.straggler->rank == rank_) time *= options_.straggler->factor;
  if (options_.delays.has_value() && UniformFloat(random_) < options_.delays->share) time *= options_.delays->factor;
  return time;
}

absl::StatusOr<double> Pace::Idle(TimePoint began) {
  if (!idles()) return 0.0;
  const TimePoint now = Now();
  const TimePoint until = began + ToChrono(Next());
  if (until <= now) return 0.0;
  PauseUntil(until, stop_);
  if (stop_.stop_requested()) return absl::CancelledError("stopped while idling for --experiment_step_time");
  return Seconds(Now() - now);
}

}  // namespace ps
