#include "worker/client/retry_policy.h"

#include <algorithm>
#include <random>

#include "common/random.h"

namespace ps {
namespace {

// gRPC ends a call at its deadline no earlier than this before it.
constexpr std::chrono::milliseconds kDeadlineSlack(100);
constexpr std::chrono::seconds kNoticeEvery(3);
constexpr std::chrono::seconds kLeastAttempt(1);
constexpr std::chrono::milliseconds kRounding(10);  // So that at a deadline that gRPC rounds down the time is over.
constexpr int kMostDoublings = 16;

}  // namespace

uint64_t RandomNumber() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // Not 0.
}

void RetryPolicy::BeginAttempt(TimePoint now, TimePoint deadline) {
  began_ = now;
  deadline_ = deadline;
}

void RetryPolicy::Heard(TimePoint at) { heard_at_ = std::max(heard_at_, at); }

RetryDecision RetryPolicy::ClassifyFailure(const absl::Status& status, TimePoint now,
                                           std::optional<TimePoint> peers_turn, bool stalled) {
  const bool late = absl::IsDeadlineExceeded(status);
  const bool broken = absl::IsUnavailable(status);
  const auto slack = std::min<std::chrono::nanoseconds>(kDeadlineSlack, (deadline_ - began_) / 10);
  RetryDecision decision;
  decision.waiting = late && now < deadline_ - slack;
  const bool answered = decision.waiting || absl::IsResourceExhausted(status);
  if (answered) Heard(now);
  failures_ = decision.waiting ? 0 : failures_ + 1;

  if (failing_since_.has_value() && heard_at_ > *failing_since_) failing_since_.reset();
  // A connection that breaks is retried from then on; a call without an answer has been silent before it ended.
  if (!failing_since_.has_value()) failing_since_ = broken && !stalled ? now : heard_at_;
  if (peers_turn.has_value()) {
    decision.silent = std::max<std::chrono::nanoseconds>(now - std::max(*failing_since_, *peers_turn), {});
  }

  if (!answered && !late && !broken) {
    decision.outcome = RetryDecision::Outcome::kFinal;
  } else if (answered && now >= options_.give_up) {
    decision.outcome = RetryDecision::Outcome::kTimeUp;
  } else if (now >= options_.give_up || decision.silent > options_.connect_timeout) {
    decision.outcome = RetryDecision::Outcome::kUnreachable;
  } else {
    decision.pause = Pause(late, now);
    decision.notice = decision.waiting || !noticed_at_.has_value() || now - *noticed_at_ >= kNoticeEvery;
    if (decision.notice && !decision.waiting) noticed_at_ = now;
  }
  return decision;
}

std::chrono::nanoseconds RetryPolicy::TimeLeft(TimePoint now, TimePoint peers_turn) const {
  const TimePoint silent_since = std::max(heard_at_, failing_since_.value_or(heard_at_));
  const std::chrono::nanoseconds left = options_.connect_timeout - (now - std::max(silent_since, peers_turn));
  const auto least = std::min<std::chrono::nanoseconds>(options_.connect_timeout / 10, kLeastAttempt);
  return std::max<std::chrono::nanoseconds>(left, least) + kRounding;
}

// An attempt that was waited on has been a pause already; but no peer is asked again and again without any.
std::chrono::nanoseconds RetryPolicy::Pause(bool late, TimePoint now) const {
  if (late) return std::max<std::chrono::nanoseconds>(began_ + options_.pause_first - now, {});
  const auto doubled = options_.pause_first * (1 << std::min(failures_ - 1, kMostDoublings));
  const auto pause = std::min<std::chrono::nanoseconds>(doubled, options_.pause_longest);
  if (options_.spread == 0) return pause;
  const uint64_t drawn = MixBits(options_.spread + static_cast<uint64_t>(failures_));
  return pause - pause / 2 * static_cast<int64_t>(drawn >> 54) / 1024;
}

}  // namespace ps
