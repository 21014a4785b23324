#include "server/chief/cut_coordinator.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Bench {
 public:
  // What the chief tells after this report of shard `shard`.
  CutCoordinator::Outcome Report(uint32_t shard, uint64_t number, v1::Cut::Phase phase, const CutSteps& steps = {},
                                 uint64_t version = 0) {
    v1::CutReport report;
    report.set_number(number);
    report.set_phase(phase);
    report.set_version(version);
    ToProto(steps, report.mutable_steps());
    return cut.OnReport(shard, report, now);
  }
  v1::Cut Begin(bool freeze, std::chrono::nanoseconds wait = seconds(10)) {
    v1::Cut commit;
    commit.add_hyperparameters()->set_name("learning_rate");
    return cut.Begin(commit, freeze, now, now + wait);
  }

  TimePoint now = TimePoint() + std::chrono::hours(1);
  CutCoordinator cut = CutCoordinator(2);
};

TEST_CASE("A cut goes up to the furthest step of each rank, and ends with each shard's version") {
  Bench bench;
  const v1::Cut freeze = bench.Begin(/*freeze=*/true);
  CHECK(freeze.phase() == v1::Cut::FREEZE);
  CHECK(freeze.hyperparameters().empty());
  CHECK_FALSE(bench.Report(0, 1, v1::Cut::FREEZE, {{0, {1, 5}}, {1, {1, 3}}}).tell.has_value());
  const auto advance = bench.Report(1, 1, v1::Cut::FREEZE, {{0, {1, 4}}, {1, {2, 2}}}).tell;
  REQUIRE(advance.has_value());
  CHECK(advance->phase() == v1::Cut::ADVANCE);
  CHECK(FromProto(advance->up_to()) == CutSteps{{0, {1, 5}}, {1, {2, 2}}});
  CHECK_FALSE(bench.Report(1, 1, v1::Cut::ADVANCE).tell.has_value());
  const auto commit = bench.Report(0, 1, v1::Cut::ADVANCE).tell;
  REQUIRE(commit.has_value());
  CHECK(commit->phase() == v1::Cut::COMMIT);
  CHECK(commit->hyperparameters_size() == 1);
  CHECK_FALSE(bench.Report(0, 1, v1::Cut::COMMIT, {}, 8).ended.has_value());
  const auto ended = bench.Report(1, 1, v1::Cut::COMMIT, {}, 9).ended;
  REQUIRE(ended.has_value());
  CHECK(**ended == std::vector<uint64_t>{8, 9});
  CHECK(bench.cut.idle());
}

TEST_CASE("A cut without a freeze is committed at once") {
  Bench bench;
  const v1::Cut commit = bench.Begin(/*freeze=*/false);
  CHECK(commit.phase() == v1::Cut::COMMIT);
  CHECK(commit.hyperparameters_size() == 1);
  bench.Report(1, 1, v1::Cut::COMMIT, {}, 4);
  bench.Report(1, 1, v1::Cut::COMMIT, {}, 4);  // Told twice, it counts once.
  CHECK(bench.Report(0, 1, v1::Cut::COMMIT, {}, 4).ended.has_value());
}

TEST_CASE("An attempt that takes too long is cancelled, and tried again after a second") {
  Bench bench;
  bench.Begin(/*freeze=*/true);
  bench.Report(0, 1, v1::Cut::FREEZE);
  bench.now += milliseconds(999);
  CHECK_FALSE(bench.cut.CheckTimes(bench.now).tell.has_value());
  bench.now += milliseconds(1);
  auto told = bench.cut.CheckTimes(bench.now).tell;
  REQUIRE(told.has_value());
  CHECK(told->phase() == v1::Cut::CANCEL);
  CHECK(told->number() == 1);
  CHECK_FALSE(bench.Report(1, 1, v1::Cut::FREEZE).tell.has_value());  // It comes too late.
  bench.now += milliseconds(1000);
  told = bench.cut.CheckTimes(bench.now).tell;
  REQUIRE(told.has_value());
  CHECK(told->phase() == v1::Cut::FREEZE);
  CHECK(told->number() == 2);
  CHECK_FALSE(bench.Report(1, 1, v1::Cut::FREEZE).tell.has_value());
  bench.Report(0, 2, v1::Cut::FREEZE);
  CHECK(bench.Report(1, 2, v1::Cut::FREEZE).tell.has_value());
}

TEST_CASE("A report that comes after its attempt's time does not commit, also if nobody looked at the clock") {
  Bench bench;
  bench.Begin(/*freeze=*/true);
  bench.Report(0, 1, v1::Cut::FREEZE);
  bench.Report(1, 1, v1::Cut::FREEZE);
  bench.Report(0, 1, v1::Cut::ADVANCE);
  bench.now += seconds(5);
  const auto told = bench.Report(1, 1, v1::Cut::ADVANCE).tell;
  REQUIRE(told.has_value());
  CHECK(told->phase() == v1::Cut::CANCEL);
}

TEST_CASE("At its deadline a cut ends with the shard, step and rank that it waited for, and nothing is changed") {
  Bench bench;
  bench.Begin(/*freeze=*/true, milliseconds(1500));
  bench.Report(0, 1, v1::Cut::FREEZE, {{2, {1, 42}}});
  bench.Report(1, 1, v1::Cut::FREEZE, {{2, {1, 41}}});
  bench.Report(0, 1, v1::Cut::ADVANCE);
  bench.now += seconds(1);
  CHECK(bench.cut.CheckTimes(bench.now).tell->phase() == v1::Cut::CANCEL);
  bench.now += milliseconds(500);
  const CutCoordinator::Outcome outcome = bench.cut.CheckTimes(bench.now);
  CHECK_FALSE(outcome.tell.has_value());
  REQUIRE(outcome.ended.has_value());
  CHECK(absl::IsDeadlineExceeded(outcome.ended->status()));
  CHECK(Message(outcome.ended->status()) ==
        "nothing is changed: the shards did not come to the same point, since shard 1 waits for step 41 of rank 2");
  CHECK(bench.cut.idle());
}

TEST_CASE("A deadline in the middle of an attempt cancels it") {
  Bench bench;
  bench.Begin(/*freeze=*/true, milliseconds(500));
  bench.now += milliseconds(500);
  const CutCoordinator::Outcome outcome = bench.cut.CheckTimes(bench.now);
  CHECK(outcome.tell->phase() == v1::Cut::CANCEL);
  CHECK(Message(outcome.ended->status()).find("shard 0 has not answered; shard 1 has not answered") !=
        std::string::npos);
}

TEST_CASE("What is committed is not taken back: at the deadline the answer says who has not confirmed it") {
  Bench bench;
  bench.Begin(/*freeze=*/false, seconds(2));
  bench.Report(0, 1, v1::Cut::COMMIT, {}, 4);
  bench.now += milliseconds(1500);
  CHECK_FALSE(bench.cut.CheckTimes(bench.now).tell.has_value());
  bench.now += milliseconds(500);
  const CutCoordinator::Outcome outcome = bench.cut.CheckTimes(bench.now);
  CHECK_FALSE(outcome.tell.has_value());
  CHECK(Message(outcome.ended->status()) == "the change is made, but shard 1 has not answered");
}

}  // namespace
}  // namespace ps
