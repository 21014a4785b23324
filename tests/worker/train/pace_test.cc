#include "worker/train/pace.h"

#include <string>
#include <thread>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

// How many of `count` batches take `time`.
int Count(Pace& pace, int count, absl::Duration time) {
  int found = 0;
  for (int i = 0; i < count; ++i) found += pace.Next() == time ? 1 : 0;
  return found;
}

TEST_CASE("Only the straggler's batches take longer, all of them by its factor") {
  const PaceOptions options = {.step_time = absl::Milliseconds(4), .straggler = {{.rank = 1, .factor = 2.5}}};
  Pace even(options, 1, 0, {});
  Pace straggler(options, 1, 1, {});
  CHECK(Count(even, 100, absl::Milliseconds(4)) == 100);
  CHECK(Count(straggler, 100, absl::Milliseconds(10)) == 100);
}

TEST_CASE("Delays come as often as they are asked for, the same for a seed, and others for another rank or seed") {
  const PaceOptions options = {.step_time = absl::Milliseconds(1), .delays = {{.share = 0.05, .factor = 10}}};
  const auto drawn = [&](uint64_t seed, uint32_t rank) {
    Pace pace(options, seed, rank, {});
    std::string delayed;
    for (int i = 0; i < 2000; ++i) delayed += pace.Next() == absl::Milliseconds(10) ? '1' : '0';
    return delayed;
  };
  const std::string first = drawn(1, 0);
  const auto often = std::count(first.begin(), first.end(), '1');
  CHECK(often > 60);
  CHECK(often < 140);
  CHECK(drawn(1, 0) == first);
  CHECK(drawn(1, 1) != first);
  CHECK(drawn(2, 0) != first);
}

TEST_CASE("A batch that was as slow by itself is not delayed, and without a step time none is") {
  Pace pace({.step_time = absl::Milliseconds(1)}, 1, 0, {});
  CHECK(*pace.Idle(Now() - std::chrono::seconds(1)) == 0);
  Pace none({}, 1, 0, {});
  CHECK_FALSE(none.idles());
  CHECK(*none.Idle(Now()) == 0);
}

TEST_CASE("Idling lasts until the batch has taken its time, and what was idled is said") {
  Pace pace({.step_time = absl::Milliseconds(20)}, 1, 0, {});
  const TimePoint began = Now();
  const absl::StatusOr<double> idled = pace.Idle(began);
  REQUIRE(idled.ok());
  CHECK(*idled > 0);
  CHECK(Now() - began >= std::chrono::milliseconds(20));
}

TEST_CASE("A stop ends the idling") {
  std::stop_source stop;
  Pace pace({.step_time = absl::Hours(1)}, 1, 0, stop.get_token());
  std::thread stopper([&] { stop.request_stop(); });
  CHECK(absl::IsCancelled(pace.Idle(Now()).status()));
  stopper.join();
}

TEST_CASE("Texts of stragglers and delays that cannot be are refused by their flag") {
  for (const char* text : {"3", "3:", ":4", "-1:4", "1:0.5", "1:nan", "1:4:4", "x:4", "1:1e9"}) {
    INFO(text);
    CHECK(Message(ParseStraggler(text).status()).rfind("--experiment_straggler=", 0) == 0);
  }
  for (const char* text : {"0.05", "1.5:10", "-0.1:10", "nan:10", "0.1:0", "0.1:inf"}) {
    INFO(text);
    CHECK(Message(ParseDelays(text).status()).rfind("--experiment_delays=", 0) == 0);
  }
  CHECK((*ParseStraggler("3:4"))->rank == 3);
  CHECK((*ParseDelays("0.05:10"))->share == 0.05);
  CHECK_FALSE(ParseDelays("")->has_value());
}

TEST_CASE("Stragglers and delays without a step time, and step times that cannot be, are refused") {
  CHECK(ValidatePace({}).ok());
  CHECK_FALSE(ValidatePace({.step_time = absl::Milliseconds(-1)}).ok());
  CHECK_FALSE(ValidatePace({.step_time = absl::InfiniteDuration()}).ok());
  CHECK_FALSE(ValidatePace({.straggler = PaceOptions::Straggler{}}).ok());
  CHECK_FALSE(ValidatePace({.delays = PaceOptions::Delays{}}).ok());
}

}  // namespace
}  // namespace ps
