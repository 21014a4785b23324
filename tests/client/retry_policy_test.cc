// Each test reads as a story of one peer: what happened when, and what is decided.
#include "worker/client/retry_policy.h"

#include <set>

#include "tests/catch.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Outcome = RetryDecision::Outcome;

const TimePoint kStart = TimePoint(std::chrono::hours(1));
constexpr seconds kCallTime(20);

// A policy, and the time.
struct Story {
  explicit Story(TimePoint give_up = TimePoint::max())
      : policy({.connect_timeout = seconds(30),
                .give_up = give_up,
                .pause_first = milliseconds(40),
                .pause_longest = milliseconds(1000)},
               kStart) {
    policy.BeginAttempt(now, now + kCallTime);
  }

  // The attempt fails `after` its beginning; the next begins after the pause.
  RetryDecision Fail(const absl::Status& status, std::chrono::nanoseconds after = milliseconds(1)) {
    now += after;
    const RetryDecision decision = policy.ClassifyFailure(status, now, peers_turn);
    now += decision.pause;
    policy.BeginAttempt(now, now + kCallTime);
    return decision;
  }

  TimePoint now = kStart;
  std::optional<TimePoint> peers_turn = kStart;
  RetryPolicy policy;
};

const absl::Status kRefused = absl::UnavailableError("connection refused");
const absl::Status kLate = absl::DeadlineExceededError("waiting for rank 1");
const absl::Status kFull = absl::ResourceExhaustedError("--max_inflight_bytes");

TEST_CASE("Every status code is final but the three that are transient") {
  for (int code = 1; code <= 16; ++code) {
    const auto status_code = static_cast<absl::StatusCode>(code);
    const bool transient = status_code == absl::StatusCode::kUnavailable ||
                           status_code == absl::StatusCode::kDeadlineExceeded ||
                           status_code == absl::StatusCode::kResourceExhausted;
    INFO(absl::StatusCodeToString(status_code));
    Story story;
    CHECK(story.Fail(absl::Status(status_code, "")).outcome == (transient ? Outcome::kRetry : Outcome::kFinal));
  }
}

TEST_CASE("A final error stays final however the time stands") {
  Story story(kStart + seconds(5));
  CHECK(story.Fail(absl::AbortedError("the job failed"), seconds(100)).outcome == Outcome::kFinal);
}

TEST_CASE("Pauses double from the first to the longest, and begin anew when the peer has let a call wait to its end") {
  Story story;
  for (const int pause : {40, 80, 160, 320, 640, 1000, 1000}) {
    CHECK(story.Fail(kRefused).pause == milliseconds(pause));
  }
  CHECK(story.Fail(kLate, seconds(10)).pause == milliseconds(0));
  CHECK(story.Fail(kRefused).pause == milliseconds(40));
  CHECK(story.Fail(kFull).pause == milliseconds(80));
}

TEST_CASE("Pauses stay at the longest however many attempts there were") {
  Story story;
  story.peers_turn = std::nullopt;
  for (int i = 0; i < 100; ++i) CHECK(story.Fail(kRefused).outcome == Outcome::kRetry);
  CHECK(story.Fail(kRefused).pause == milliseconds(1000));
}

TEST_CASE("Clients that lose a peer at the same time return to it spread over half of each pause") {
  std::set<std::chrono::nanoseconds> pauses;
  std::chrono::nanoseconds total{};
  constexpr int kClients = 300;
  for (uint64_t client = 1; client <= kClients; ++client) {
    RetryPolicy policy({.connect_timeout = seconds(30),
                        .pause_first = milliseconds(1000),
                        .pause_longest = milliseconds(1000),
                        .spread = client},
                       kStart);
    policy.BeginAttempt(kStart, kStart + kCallTime);
    const RetryDecision decision = policy.ClassifyFailure(kRefused, kStart + milliseconds(1), kStart);
    CHECK(decision.outcome == Outcome::kRetry);
    CHECK(decision.pause > milliseconds(500));
    CHECK(decision.pause <= milliseconds(1000));
    pauses.insert(decision.pause);
    total += decision.pause;
  }
  CHECK(pauses.size() > kClients / 2);
  CHECK(total / kClients > milliseconds(700));
  CHECK(total / kClients < milliseconds(800));
}

TEST_CASE("A peer that ends waits at once is not asked without a pause") {
  Story story;
  CHECK(story.Fail(kLate, milliseconds(1)).pause == milliseconds(39));
  CHECK(story.Fail(kLate, milliseconds(1)).pause == milliseconds(39));
}

TEST_CASE("The peer's own deadline is an answer, and the call's own is silence") {
  Story answered;
  const RetryDecision waits = answered.Fail(kLate, kCallTime - milliseconds(101));
  CHECK(waits.waiting);
  CHECK(waits.silent == seconds(0));

  // gRPC may end a call a little before its deadline.
  Story silent;
  const RetryDecision late = silent.Fail(kLate, kCallTime - milliseconds(99));
  CHECK_FALSE(late.waiting);
  CHECK(late.silent == kCallTime - milliseconds(99));
}

TEST_CASE("A peer that never answers is given up after connect_timeout") {
  Story story;
  CHECK(story.Fail(kLate, kCallTime).outcome == Outcome::kRetry);
  const RetryDecision end = story.Fail(kLate, kCallTime);
  CHECK(end.outcome == Outcome::kUnreachable);
  CHECK(end.silent == 2 * kCallTime);
}

TEST_CASE("An attempt that this side ended for silence counts from when the peer was last heard of") {
  RetryPolicy policy({.connect_timeout = seconds(30)}, TimePoint(seconds(100)));
  policy.BeginAttempt(TimePoint(seconds(100)), TimePoint(seconds(1000)));
  policy.Heard(TimePoint(seconds(105)));
  const RetryDecision decision =
      policy.ClassifyFailure(kRefused, TimePoint(seconds(136)), TimePoint(seconds(100)), /*stalled=*/true);
  CHECK(decision.outcome == Outcome::kUnreachable);
  CHECK(decision.silent == seconds(31));
}

TEST_CASE("An attempt may take what is left of connect_timeout, and a little at least") {
  const TimePoint begun(seconds(100));
  RetryPolicy policy({.connect_timeout = seconds(30)}, begun);
  CHECK(policy.TimeLeft(begun, begun) == milliseconds(30010));
  policy.BeginAttempt(begun, begun + seconds(10));
  CHECK(policy.ClassifyFailure(kLate, begun + seconds(10), begun).outcome == Outcome::kRetry);
  CHECK(policy.TimeLeft(begun + seconds(10), begun) == milliseconds(20010));
  CHECK(policy.TimeLeft(begun + seconds(40), begun) == milliseconds(1010));
  policy.Heard(begun + seconds(40));
  CHECK(policy.TimeLeft(begun + seconds(40), begun) == milliseconds(30010));
}

TEST_CASE("A peer that answers is never given up before its time, however long it takes") {
  Story story;
  for (int i = 0; i < 1000; ++i) {
    CHECK(story.Fail(i % 2 == 0 ? kLate : kFull, seconds(10)).outcome == Outcome::kRetry);
  }
}

TEST_CASE("A connection that breaks counts from then on, not from when the call began") {
  Story story;
  CHECK(story.Fail(kRefused, seconds(15)).silent == seconds(0));
  const RetryDecision second = story.Fail(kRefused, seconds(15));
  CHECK(second.outcome == Outcome::kRetry);
  CHECK(second.silent == seconds(15) + milliseconds(40));
  CHECK(story.Fail(kRefused, seconds(15)).outcome == Outcome::kUnreachable);
}

TEST_CASE("An answer or bytes that move end a silence") {
  for (const bool answer : {true, false}) {
    Story story;
    CHECK(story.Fail(kRefused).outcome == Outcome::kRetry);
    story.now += seconds(29);
    if (answer) {
      CHECK(story.Fail(kFull).silent == seconds(0));
    } else {
      story.policy.Heard(story.now);
    }
    const RetryDecision decision = story.Fail(kRefused, seconds(2));
    CHECK(decision.outcome == Outcome::kRetry);
    CHECK(decision.silent <= seconds(3));
  }
}

TEST_CASE("What was heard earlier does not undo what was heard later") {
  Story story;
  story.policy.Heard(kStart + seconds(10));
  story.policy.Heard(kStart + seconds(5));
  CHECK(story.Fail(kLate, kCallTime).silent == seconds(10));
}

TEST_CASE("Silence is no problem before the peer has all that it needs, and counts from then on") {
  Story story;
  story.peers_turn = std::nullopt;
  for (int i = 0; i < 10; ++i) CHECK(story.Fail(kRefused, seconds(10)).outcome == Outcome::kRetry);
  story.peers_turn = story.now;
  const RetryDecision first = story.Fail(kRefused, seconds(20));
  CHECK(first.outcome == Outcome::kRetry);
  CHECK(first.silent == seconds(20));
  CHECK(story.Fail(kRefused, seconds(20)).outcome == Outcome::kUnreachable);
}

TEST_CASE("At its end a wait fails as the peer's state is: it waits, it is full, or it cannot be reached") {
  const TimePoint end = kStart + seconds(5);
  CHECK(Story(end).Fail(kLate, seconds(5)).outcome == Outcome::kTimeUp);
  CHECK(Story(end).Fail(kFull, seconds(5)).outcome == Outcome::kTimeUp);
  CHECK(Story(end).Fail(kRefused, seconds(5)).outcome == Outcome::kUnreachable);
  CHECK(Story(end).Fail(kLate, kCallTime).outcome == Outcome::kUnreachable);
  CHECK(Story(end).Fail(kRefused, seconds(4)).outcome == Outcome::kRetry);
  CHECK(Story(end).Fail(kLate, seconds(4)).outcome == Outcome::kRetry);
}

TEST_CASE("The user is told of a failure at once, then every three seconds, and of every wait") {
  Story story;
  story.peers_turn = std::nullopt;
  CHECK(story.Fail(kRefused).notice);
  CHECK_FALSE(story.Fail(kRefused).notice);
  CHECK_FALSE(story.Fail(kRefused, milliseconds(2500)).notice);
  CHECK(story.Fail(kRefused, milliseconds(500)).notice);
  CHECK(story.Fail(kLate, seconds(1)).notice);
  CHECK(story.Fail(kLate, seconds(1)).notice);
  CHECK_FALSE(story.Fail(kRefused).notice);
}

TEST_CASE("Of a short call the peer's deadline is told from the call's own, too") {
  RetryPolicy policy({.connect_timeout = milliseconds(300),
                      .give_up = TimePoint::max(),
                      .pause_first = milliseconds(200),
                      .pause_longest = milliseconds(200)},
                     kStart);
  policy.BeginAttempt(kStart, kStart + milliseconds(50));
  CHECK(policy.ClassifyFailure(kLate, kStart + milliseconds(44), kStart).waiting);
  policy.BeginAttempt(kStart, kStart + milliseconds(50));
  CHECK_FALSE(policy.ClassifyFailure(kLate, kStart + milliseconds(46), kStart).waiting);
}

}  // namespace
}  // namespace ps
