// A shard's part in a cut, and how it takes over hyperparameters that change.
#include "server/shard/shard_cut.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "tests/log_text.h"
#include "tests/server/test_shard.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using Push = ShardCut::Push;
using Pushes = std::vector<ShardCut::Push>;

constexpr std::chrono::seconds kHold(3);
const ShardCut::OwnsFunction kAllOwn = [](uint32_t, uint64_t) { return true; };

ShardCut::AppliedFunction Applied(const CutSteps& steps) {
  return [steps](uint32_t rank) { return steps.contains(rank) ? steps.at(rank) : CutStep(); };
}

TEST_CASE("While a cut is open nothing is held, and no push is part of one") {
  ShardCut cut;
  CHECK_FALSE(cut.Hold({0, 1, 5}));
  CHECK_FALSE(cut.Reached(Applied({}), kAllOwn));
  CHECK(cut.Advance(1, {{0, {1, 5}}}).empty());
  CHECK(cut.End().empty());
}

TEST_CASE("A frozen shard holds every push, and lets go of those before the cut's steps, in their order") {
  ShardCut cut;
  cut.Freeze(1, kHold, {});
  CHECK(cut.Hold({1, 1, 8}));
  CHECK(cut.Hold({0, 1, 5}));
  CHECK(cut.Hold({2, 3, 4}));
  CHECK(cut.Advance(2, {{0, {1, 6}}}).empty());  // Another cut's.
  CHECK(cut.Advance(1, {{0, {1, 6}}, {1, {1, 9}}, {2, {2, 9}}}) == Pushes{{1, 1, 8}, {0, 1, 5}});
  CHECK_FALSE(cut.Hold({1, 1, 7}));
  CHECK(cut.Hold({0, 1, 6}));
  CHECK(cut.End() == Pushes{{2, 3, 4}, {0, 1, 6}});
  CHECK_FALSE(cut.frozen());
}

TEST_CASE("A shard is there when it has applied the steps of all ranks that still have their owner, and says so once") {
  ShardCut cut;
  cut.Freeze(1, kHold, {});
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 9}}}), kAllOwn));
  (void)cut.Advance(1, {{0, {1, 6}}, {1, {1, 3}}});
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 6}}}), kAllOwn));
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 6}}, {1, {1, 2}}}), kAllOwn));
  CHECK(cut.Reached(Applied({{0, {1, 6}}}), [](uint32_t rank, uint64_t) { return rank == 0; }));
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 6}}}), [](uint32_t rank, uint64_t) { return rank == 0; }));
  cut.Freeze(2, kHold, {});
  (void)cut.Advance(2, {});
  CHECK(cut.Reached(Applied({}), kAllOwn));
}

TEST_CASE("A cut that is advanced anew begins to look at all ranks anew") {
  ShardCut cut;
  cut.Freeze(1, kHold, {});
  (void)cut.Advance(1, {{0, {1, 6}}, {1, {1, 3}}});
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 6}}}), kAllOwn));
  cut.Freeze(2, kHold, {});
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 9}}, {1, {1, 9}}}), kAllOwn));  // How far they are to come is not known yet.
  (void)cut.Advance(2, {{0, {1, 7}}, {1, {1, 3}}});
  CHECK_FALSE(cut.Reached(Applied({{0, {1, 6}}, {1, {1, 3}}}), kAllOwn));
  CHECK(cut.Reached(Applied({{0, {2, 0}}, {1, {1, 3}}}), kAllOwn));  // A later owner is further.
}

TEST_CASE("An attempt whose end is not heard of is over after its time, unless the shard was there: then it waits") {
  ShardCut cut;
  const TimePoint began = TimePoint() + std::chrono::hours(1);
  CHECK_FALSE(cut.Expired(began));
  cut.Freeze(1, kHold, began);
  CHECK_FALSE(cut.Expired(began + kHold));
  CHECK(cut.Expired(began + kHold + std::chrono::nanoseconds(1)));
  (void)cut.Advance(1, {});
  CHECK(cut.Expired(began + std::chrono::hours(1)));
  CHECK(cut.Reached(Applied({}), kAllOwn));
  CHECK_FALSE(cut.Expired(began + std::chrono::hours(1)));
  CHECK(cut.End().empty());
  CHECK_FALSE(cut.Expired(began + std::chrono::hours(1)));
}

// ---- With a shard

v1::Cut Phase(uint64_t number, v1::Cut::Phase phase) {
  v1::Cut cut;
  cut.set_number(number);
  cut.set_phase(phase);
  return cut;
}

void Tell(TestShard& test, const v1::Cut& cut) {
  v1::ChiefUpdate update;
  *update.mutable_cut() = cut;
  test.shard.OnChiefUpdate(update);
}

v1::Cut Commit(uint64_t number, float learning_rate) {
  v1::Cut cut = Phase(number, v1::Cut::COMMIT);
  cut.add_hyperparameters()->set_name("learning_rate");
  cut.mutable_hyperparameters(0)->set_value(learning_rate);
  return cut;
}

// The shard's report of this phase, once there is one.
v1::CutReport Reported(TestShard& test, uint64_t number, v1::Cut::Phase phase) {
  MutexLock lock(test.reports_mutex);
  const TimePoint deadline = Now() + std::chrono::minutes(2);
  do {
    for (const v1::ShardReport& report : test.reports) {
      if (report.cut().number() == number && report.cut().phase() == phase) return report.cut();
    }
  } while (test.reported.WaitUntil(test.reports_mutex, deadline));
  FAIL("the shard did not report " << v1::Cut::Phase_Name(phase));
  return {};
}

float Weight(TestShard& test) { return test.Pull(std::nullopt)->weights()[0]; }

TEST_CASE("A frozen shard answers no new push, goes up to the cut's steps, and on when it is committed") {
  TestShard test("asp");
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  REQUIRE(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  Tell(test, Phase(1, v1::Cut::FREEZE));
  const v1::CutReport frozen = Reported(test, 1, v1::Cut::FREEZE);
  CHECK(FromProto(frozen.steps()) == CutSteps{{0, {1, 1}}});
  Reply<v1::PushReply> zero;
  Reply<v1::PushReply> one;
  REQUIRE(test.Add(0, 1, {1, 1, 1, 1}).ok());
  test.AwaitPush(TestShard::Header(0, 1), TestShard::kLong, zero.Callback());
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  test.AwaitPush(TestShard::Header(1, 0), TestShard::kLong, one.Callback());
  CHECK(Weight(test) == 0);
  v1::Cut advance = Phase(1, v1::Cut::ADVANCE);
  ToProto(CutSteps{{0, {1, 1}}, {1, {1, 1}}}, advance.mutable_up_to());  // Another shard has answered rank 1.
  Tell(test, advance);
  CHECK(one.Wait()->version() == 2);
  CHECK(Reported(test, 1, v1::Cut::ADVANCE).version() == 2);
  Tell(test, Commit(1, 0.5F));
  CHECK(Reported(test, 1, v1::Cut::COMMIT).version() == 3);
  CHECK(zero.Wait()->version() == 3);
  CHECK(Weight(test) == -1.5F);
}

TEST_CASE("A cut that is cancelled, forgotten, or left without a chief holds nothing for good") {
  for (const std::string end : {"cancelled", "forgotten", "left"}) {
    CAPTURE(end);
    TestShard test("asp");
    Tell(test, Phase(1, v1::Cut::FREEZE));
    REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
    Reply<v1::PushReply> reply;
    test.AwaitPush(TestShard::Header(0, 0), TestShard::kLong, reply.Callback());
    CHECK(Weight(test) == 1);
    if (end == "cancelled") Tell(test, Phase(1, v1::Cut::CANCEL));
    if (end == "left") {
      test.shard.SetChiefLost(true);
      test.shard.SetChiefLost(false);  // It may go on with the cut.
      CHECK(Weight(test) == 1);
    }
    if (end != "cancelled") {
      test.now += std::chrono::seconds(9);
      test.shard.Tick(test.now);
      CHECK(Weight(test) == 1);
      test.now += std::chrono::seconds(2);
      test.shard.Tick(test.now);
    }
    const absl::StatusOr<v1::PushReply> answer = reply.Wait();
    if (end != "left") CHECK(answer->answer() == v1::ANSWER_APPLIED);
    CHECK(test.Answer(0, 0).ok());
    CHECK(Weight(test) == 0);
  }
}

// Others may have made the change already, and apply pushes with it.
TEST_CASE("A shard that has told that it is at the cut applies no push beyond it before it hears what came of it") {
  for (const bool commits : {true, false}) {
    CAPTURE(commits);
    TestShard test("asp");
    v1::Cut freeze = Phase(1, v1::Cut::FREEZE);
    freeze.set_hold_ms(1000);
    Tell(test, freeze);
    Tell(test, Phase(1, v1::Cut::ADVANCE));
    Reported(test, 1, v1::Cut::ADVANCE);
    REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
    Reply<v1::PushReply> reply;
    test.AwaitPush(TestShard::Header(0, 0), TestShard::kLong, reply.Callback());
    test.now += std::chrono::seconds(12);
    test.shard.Tick(test.now);
    CHECK(Weight(test) == 1);
    Tell(test, commits ? Commit(1, 0.5F) : Phase(1, v1::Cut::CANCEL));
    CHECK(reply.Wait()->answer() == v1::ANSWER_APPLIED);
    CHECK(Weight(test) == (commits ? 0.5F : 0));
  }
}

TEST_CASE(
    "A shard whose pushes stand still for a cut says what it waits for, in its status and every 10 s in the log") {
  LogText log;
  TestShard test("asp");
  v1::Cut freeze = Phase(7, v1::Cut::FREEZE);
  freeze.set_hold_ms(60000);
  Tell(test, freeze);
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  Reply<v1::PushReply> reply;
  test.AwaitPush(TestShard::Header(0, 0), TestShard::kLong, reply.Callback());
  const std::string held = "cut 7: waiting for all shards to come to the same point; it has held pushes back for ";
  test.now += std::chrono::seconds(9);
  test.shard.Tick(test.now);
  CHECK(log.Take().find("cut 7") == std::string::npos);
  CHECK(test.shard.Status(test.now).waiting_for() == held + "9.0 s");
  test.now += std::chrono::seconds(1);
  test.shard.Tick(test.now);
  CHECK(log.Take() == "W " + held + "10 s\n");
  Tell(test, Phase(7, v1::Cut::ADVANCE));
  Reported(test, 7, v1::Cut::ADVANCE);
  test.now += std::chrono::seconds(9);
  test.shard.Tick(test.now);
  CHECK(log.Take().empty());
  test.now += std::chrono::minutes(10);  // It has told that it is there, so it waits however long the word takes.
  test.shard.Tick(test.now);
  CHECK(log.Take() == "W cut 7: waiting for the chief's word; it has held pushes back for 619 s\n");
  Tell(test, Phase(7, v1::Cut::CANCEL));
  CHECK(reply.Wait()->answer() == v1::ANSWER_APPLIED);
  test.now += std::chrono::hours(1);
  test.shard.Tick(test.now);
  CHECK(log.Take().empty());
}

TEST_CASE("A shard that has given up a cut does not tell later that it is there, and takes over no change of it") {
  TestShard test("asp");
  v1::Cut freeze = Phase(1, v1::Cut::FREEZE);
  freeze.set_hold_ms(500);
  Tell(test, freeze);
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  Reply<v1::PushReply> reply;
  test.AwaitPush(TestShard::Header(0, 0), TestShard::kLong, reply.Callback());
  test.now += std::chrono::seconds(1);
  test.shard.Tick(test.now);
  CHECK(Weight(test) == 1);
  test.now += std::chrono::seconds(1);
  test.shard.Tick(test.now);
  CHECK(reply.Wait()->answer() == v1::ANSWER_APPLIED);
  v1::Cut advance = Phase(1, v1::Cut::ADVANCE);
  ToProto(CutSteps{{0, {1, 1}}}, advance.mutable_up_to());
  Tell(test, advance);
  {
    MutexLock lock(test.reports_mutex);
    for (const v1::ShardReport& report : test.reports) CHECK(report.cut().phase() != v1::Cut::ADVANCE);
  }
  Tell(test, Commit(1, 0.5F));  // No chief does.
  CHECK(test.Failures(1) ==
        std::vector<std::string>{"cut 1 came when this shard had given it up: hyperparameters would differ"});
  MutexLock lock(test.reports_mutex);
  for (const v1::ShardReport& report : test.reports) CHECK(report.cut().phase() != v1::Cut::COMMIT);
}

TEST_CASE("A checkpoint whose cut a shard has given up is not taken there: its versions would not belong together") {
  TestShard test("asp");
  Tell(test, Phase(1, v1::Cut::FREEZE));
  test.shard.SetChiefLost(true);
  test.now += std::chrono::seconds(11);
  test.shard.Tick(test.now);
  test.shard.SetChiefLost(false);
  v1::Cut commit = Phase(1, v1::Cut::COMMIT);
  commit.set_checkpoint(5);
  Tell(test, commit);
  MutexLock lock(test.reports_mutex);
  const TimePoint deadline = Now() + std::chrono::minutes(2);
  const auto is_told = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(test.reports_mutex) {
    return std::any_of(test.reports.begin(), test.reports.end(), [](const v1::ShardReport& report) {
      return report.checkpoint().number() == 5 &&
             report.checkpoint().failure() == "the chief was not heard from for too long";
    });
  };
  while (!is_told() && test.reported.WaitUntil(test.reports_mutex, deadline)) {
  }
  CHECK(is_told());
}

TEST_CASE("The push of a worker that is lost while it is held is not applied, and its rank's next owner may push") {
  TestShard test("asp");
  Tell(test, Phase(1, v1::Cut::FREEZE));
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_incarnation(2); });
  v1::PushRequest header = TestShard::Header(1, 0);
  *header.mutable_id() = TestShard::Id(1, 2);
  REQUIRE(test.Add(header, {TestShard::Slice(0, {0.5F, 0.5F, 0.5F, 0.5F})}).ok());
  Tell(test, Phase(1, v1::Cut::CANCEL));
  Reply<v1::PushReply> reply;
  test.AwaitPush(header, TestShard::kLong, reply.Callback());
  CHECK(reply.Wait()->answer() == v1::ANSWER_APPLIED);
  CHECK(Weight(test) == 0.5F);
}

TEST_CASE("A shard alone in asp changes with its next version, in bsp two steps ahead") {
  TestShard asp("asp");
  REQUIRE(asp.Add(0, 0, {1, 1, 1, 1}).ok());
  REQUIRE(asp.Answer(0, 0).ok());
  Tell(asp, Commit(1, 0.25F));
  CHECK(Reported(asp, 1, v1::Cut::COMMIT).version() == 2);
  REQUIRE(asp.Add(0, 1, {1, 1, 1, 1}).ok());
  REQUIRE(asp.Answer(0, 1).ok());
  CHECK(Weight(asp) == -0.25F);

  TestShard bsp("bsp");
  Tell(bsp, Commit(1, 0.25F));
  CHECK(Reported(bsp, 1, v1::Cut::COMMIT).version() == 2);
  for (const uint64_t step : {0U, 1U}) {
    REQUIRE(bsp.Add(0, step, {1, 1, 1, 1}).ok());
    REQUIRE(bsp.Add(1, step, {1, 1, 1, 1}).ok());
    REQUIRE(bsp.Answer(0, step).ok());
    CHECK(bsp.Pull(step + 1)->weights()[0] == (step == 0 ? 0 : -0.25F));
  }
}

TEST_CASE("A member that takes steps by itself is told the hyperparameters of the version that follows what it reads") {
  TestShard test("local_sgd");
  const auto told = [&](const v1::Identity& id) {
    Reply<ShardAnswer> reply;
    test.shard.Await(nullptr, {.caller = {.id = id, .peer = ""}, .push = {}, .weights = true, .wait = TestShard::kLong},
                     /*push_ended=*/false, ClientOf(reply.Callback()));
    return reply.Wait()->hyperparameters;
  };
  Tell(test, Commit(1, 0.25F));
  CHECK(Reported(test, 1, v1::Cut::COMMIT).version() == 2);  // Others may have read the version before with the rest.
  CHECK(told(TestShard::Id(0)) == HyperparameterValues{{"learning_rate", 1}, {"weight_decay", 0}});
  CHECK(told({}).empty());
  for (const uint32_t rank : {0U, 1U}) {
    v1::PushRequest header = TestShard::Header(rank, 0);
    header.set_contribution(v1::CONTRIBUTION_WEIGHT_DIFFERENCE);
    REQUIRE(test.Add(header, {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
  }
  REQUIRE(test.Answer(0, 0).ok());
  CHECK(told(TestShard::Id(0))["learning_rate"] == 0.25F);
  CHECK(TestShard("bsp").Pull(std::nullopt).ok());
}

}  // namespace
}  // namespace ps
