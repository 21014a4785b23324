#include <limits>

#include "common/status.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

TEST_CASE("A shard that is alone tells its chief of new versions now and then, and not of each") {
  TestShard test("bsp");
  const auto applied = [&] {
    MutexLock lock(test.reports_mutex);
    std::vector<uint64_t> versions;
    for (const v1::ShardReport& report : test.reports) versions.push_back(report.applied_version());
    test.reports.clear();
    return versions;
  };
  for (uint64_t step = 0; step < 3; ++step) {
    for (const uint32_t rank : {0U, 1U}) REQUIRE(test.Add(rank, step, {1, 1, 1, 1}).ok());
    REQUIRE(test.Answer(0, step).ok());
  }
  (void)applied();
  test.shard.Tick(test.now);
  CHECK(applied() == std::vector<uint64_t>{3});
  test.shard.Tick(test.now);
  CHECK(applied().empty());
}

TEST_CASE("A push is applied once, and sent again it is a DUPLICATE that changes nothing") {
  TestShard test("asp");
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_DUPLICATE);
  const auto pin = test.Pull(1);
  REQUIRE(pin.ok());
  CHECK(pin->weights()[0] == 0);
  CHECK(pin->weights()[1] == 1);
}

TEST_CASE("bsp makes a version of both workers' means, weighted by samples, in rank order") {
  TestShard test("bsp");
  REQUIRE(test.Add(TestShard::Header(1, 0, 3), {TestShard::Slice(0, {0, 4, 0, 0})}).ok());
  CHECK_FALSE(test.Pull(1).ok());
  REQUIRE(test.Add(TestShard::Header(0, 0, 1), {TestShard::Slice(0, {4, 0, 0, 0})}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  const auto pin = test.Pull(1);
  REQUIRE(pin.ok());
  CHECK(pin->weights()[0] == 1 - 0.25F * 4);
  CHECK(pin->weights()[1] == 1 - 0.75F * 4);
}

TEST_CASE("An empty contribution completes a step without changing the mean") {
  TestShard test("bsp");
  REQUIRE(test.Add(TestShard::Header(1, 0, 0), {}).ok());
  REQUIRE(test.Add(0, 0, {1, 2, 3, 4}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Pull(1)->weights()[3] == 1 - 4);
}

TEST_CASE("Pushes that cannot be right are refused by what is wrong, and the job goes on") {
  TestShard test("bsp");
  const auto refused = [&](const v1::PushRequest& header, std::vector<ReceivedSlice> slices,
                           const std::string& naming) {
    const absl::Status status = test.Add(header, std::move(slices));
    return !status.ok() && Message(status).find(naming) != std::string::npos;
  };
  using T = TestShard;
  CHECK(refused(T::Header(0, 0), {T::Slice(0, {1, 2})}, "8 bytes, expected 16"));
  CHECK(refused(T::Header(0, 0), {T::Slice(9, {1, 2, 3, 4})}, "slice 9"));
  CHECK(refused(T::Header(0, 0), {T::Slice(0, {1, std::numeric_limits<float>::quiet_NaN(), 3, 4})}, "tensor w"));
  CHECK(refused(T::Header(0, 0, 0), {T::Slice(0, {1, 2, 3, 4})}, "samples is 0"));
  CHECK(refused(T::Header(0, 7), {T::Slice(0, {1, 2, 3, 4})}, "step 7: the job's current step is 0"));
  v1::PushRequest future = T::Header(0, 0);
  future.set_version(99);
  CHECK(refused(future, {T::Slice(0, {1, 2, 3, 4})}, "version 99"));
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
  REQUIRE(test.Add(0, 0, {0, 0, 0, 0}).ok());
  REQUIRE(test.Add(1, 0, {0, 0, 0, 0}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("A push that ends with slices missing is refused, and can be sent anew") {
  TestShard test("asp");
  REQUIRE(test.Add(TestShard::Header(0, 0), {}).ok());
  const auto answer = test.Answer(0, 0);
  CHECK(absl::IsInvalidArgument(answer.status()));
  CHECK(Message(answer.status()).find("only 0 of the 1 slices") != std::string::npos);
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("An older incarnation is FENCED, and its half push is dropped") {
  TestShard test("asp");
  REQUIRE(test.Add(TestShard::Header(1, 0), {}).ok());
  CHECK(test.shard.Status(test.now).inflight_bytes() == 16);
  v1::ChiefUpdate update;
  *update.mutable_view() = TestShard::View(3, v1::PHASE_RUNNING);
  update.mutable_view()->mutable_members(1)->set_incarnation(2);
  test.shard.OnChiefUpdate(update);
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(1, 0)->answer() == v1::ANSWER_FENCED);
  CHECK(test.Pull(0)->weights()[0] == 1);
}

TEST_CASE("A wait that times out names whom it waited for") {
  TestShard test("bsp");
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  const auto pin = test.Pull(1);
  CHECK(absl::IsDeadlineExceeded(pin.status()));
  CHECK(Message(pin.status()).find("step 0: waiting for rank 1") != std::string::npos);
}

TEST_CASE("Past its limits a shard answers RESOURCE_EXHAUSTED") {
  ShardOptions options;
  options.max_inflight_bytes = 16;
  options.max_parked = 2;
  TestShard test("asp", options);
  REQUIRE(test.Add(TestShard::Header(0, 0), {}).ok());
  CHECK(absl::IsResourceExhausted(test.Add(1, 0, {1, 1, 1, 1})));
  // Pulls of versions that are far off are parked. Strangers share places, and each worker has its own.
  const auto parked = [&](const v1::Identity& id) {
    const auto status = std::make_shared<absl::Status>(absl::OkStatus());  // Callbacks come later than this returns.
    int places = -1;
    for (; status->ok() && places < 100; ++places) {
      test.AwaitPull({.id = id, .peer = ""}, 5, TestShard::kLong,
                     [status](const absl::StatusOr<VersionPin>& pin) { *status = pin.status(); });
    }
    CHECK(absl::IsResourceExhausted(*status));
    return places;
  };
  CHECK(parked({}) == 2);
  CHECK(parked(TestShard::Id(0)) == 8);
  CHECK(parked(TestShard::Id(1)) == 8);
  CHECK(test.shard.Status(test.now).parked() == 18);
  CHECK(test.shard.Status(test.now).parked_others() == 2);
  // Those of an older owner of the rank are told, and leave its places.
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_incarnation(2); });
  CHECK(test.shard.Status(test.now).parked() == 10);
  CHECK(parked(TestShard::Id(1, 2)) == 8);
  test.shard.Shutdown(absl::CancelledError("the test ends"));
}

TEST_CASE("When the job fails, whoever waits is told why") {
  TestShard test("bsp");
  absl::Status told = absl::OkStatus();
  test.AwaitPull({.id = TestShard::Id(0), .peer = ""}, 1, TestShard::kLong,
                 [&](absl::StatusOr<VersionPin> pin) { told = pin.status(); });
  v1::ChiefUpdate update;
  *update.mutable_view() = TestShard::View(3, v1::PHASE_FAILED);
  update.mutable_view()->set_failure("rank 1 was lost");
  test.shard.OnChiefUpdate(update);
  CHECK(absl::IsAborted(told));
  CHECK(Message(told).find("rank 1 was lost") != std::string::npos);
}

TEST_CASE("An update that waits because all weight buffers are pinned says so, and is made when one is released") {
  TestShard test("asp", {.max_versions = 1});
  auto pin = test.Pull(0);
  REQUIRE(pin.ok());
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  Reply<v1::PushReply> early;
  test.AwaitPush(TestShard::Header(0, 0), {}, early.Callback());
  test.shard.Tick(test.now);
  CHECK(Message(early.Wait().status()).find("--max_versions=1") != std::string::npos);
  CHECK(pin->weights()[0] == 1);
  pin = absl::CancelledError("let go");
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Pull(1)->weights()[0] == 0);
}

TEST_CASE("What was built ahead of a push that turns out wrong is dropped, weights and state") {
  ShardOptions options;
  options.optimizer = "momentum";
  options.apply_threads = 0;
  TestShard test("bsp", options, {{"a", {2}}, {"b", {2}}});
  const auto add = [&](uint32_t rank, uint64_t step, uint32_t slice, std::vector<float> values) {
    return test.Add(TestShard::Header(rank, step), {TestShard::Slice(slice, std::move(values))});
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float velocity = 0;
  float weight = 1;
  for (uint64_t step = 0; step < 3; ++step) {
    REQUIRE(add(0, step, 0, {2, 2}).ok());
    REQUIRE(add(1, step, 0, {100, 100}).ok());  // Built now.
    CHECK(test.Pull(step)->weights()[0] == weight);
    CHECK(absl::IsInvalidArgument(add(1, step, 1, {nan, 0})));
    REQUIRE(add(1, step, 0, {4, 4}).ok());
    REQUIRE(add(1, step, 1, {4, 4}).ok());
    CHECK(test.Pull(step)->weights()[0] == weight);
    REQUIRE(add(0, step, 1, {2, 2}).ok());
    CHECK_FALSE(test.shard.ApplyPosted());  // All of it was built as it came, by whoever brought it.
    CHECK(test.Answer(0, step)->answer() == v1::ANSWER_APPLIED);
    velocity = 0.5F * velocity + 3;
    weight -= velocity;
    const auto pin = test.Pull(step + 1);
    REQUIRE(pin.ok());
    for (const float each : pin->weights().first(2)) CHECK(each == weight);
  }
  CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
}

TEST_CASE(
    "A worker that joins while a step is being built takes part in it, and its slices are not taken for others'") {
  ShardOptions options;
  options.apply_threads = 0;
  options.mode.on_worker_loss = "continue";
  const Layout model = {{"a", {2}}, {"b", {2}}};
  TestShard test("bsp", options, model);
  const auto add = [&](uint32_t rank, uint32_t slice, float value) {
    return test.Add(TestShard::Header(rank, 0), {TestShard::Slice(slice, {value, value})});
  };
  v1::ChiefUpdate alone;
  *alone.mutable_view() = TestShard::View(3, v1::PHASE_RUNNING, model);
  alone.mutable_view()->mutable_members()->RemoveLast();
  test.shard.OnChiefUpdate(alone);
  REQUIRE(add(0, 0, 2).ok());  // Slice a is built now, of rank 0 alone.
  v1::ChiefUpdate both;
  *both.mutable_view() = TestShard::View(4, v1::PHASE_RUNNING, model);
  test.shard.OnChiefUpdate(both);
  REQUIRE(add(1, 0, 6).ok());
  REQUIRE(add(1, 1, 6).ok());
  REQUIRE(add(0, 1, 2).ok());
  v1::ChiefUpdate decision;
  v1::StepDecision* const decided = decision.add_decisions();
  decided->add_ranks(0);
  decided->add_ranks(1);
  test.shard.OnChiefUpdate(decision);
  test.shard.ApplyPosted();
  const auto pin = test.Pull(1);
  REQUIRE(pin.ok());
  for (size_t local : {0U, 1U}) CHECK(pin->slice(local)[0] == 1 - 4);
}

TEST_CASE("A push that restarts with other samples is not counted for what was being built of it as it was") {
  for (const bool built : {true, false}) {
    CAPTURE(built);
    ShardOptions options;
    options.apply_threads = 0;
    TestShard test("bsp", options, {{"a", {2}}, {"b", {2}}});
    const auto add = [&](uint32_t rank, uint32_t samples, uint32_t slice, float value) {
      return test.Add(TestShard::Header(rank, 0, samples), {TestShard::Slice(slice, {value, value})});
    };
    REQUIRE(add(0, 8, 0, 100).ok());
    REQUIRE(add(1, 8, 0, 4).ok());  // Slice a is built now.
    REQUIRE(add(1, 8, 1, 4).ok());
    REQUIRE(add(0, 24, built ? 0 : 1, 8).ok());
    CHECK(test.Pull(0)->weights()[0] == 1);
    REQUIRE(add(0, 24, built ? 1 : 0, 8).ok());
    test.shard.ApplyPosted();
    CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
    const auto pin = test.Pull(1);
    REQUIRE(pin.ok());
    for (size_t local : {0U, 1U}) CHECK(pin->slice(local)[0] == 1 - 7);  // A quarter of 4 and three of 8.
    CHECK(test.shard.Status(test.now).inflight_bytes() == 0);
  }
}

}  // namespace
}  // namespace ps
