// How a shard ends a job that cannot go on, and what it answers when a job has ended, or begins anew.
#include <limits>

#include "common/status.h"
#include "server/shard/push_pull_session.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

using Failures = std::vector<std::string>;

TEST_CASE("A version that is not finite is not published: the job ends with its tensor and the learning rate") {
  for (const char* mode : {"bsp", "asp"}) {
    CAPTURE(mode);
    TestShard test(mode, {}, {{"a", {2}}, {"b", {2}}});
    const float huge = std::numeric_limits<float>::max();
    const auto push = [&](uint32_t rank, uint64_t step) {
      return test.Add(TestShard::Header(rank, step),
                      {TestShard::Slice(0, {1, 1}), TestShard::Slice(1, {-huge, -huge})});
    };
    // In asp a version of rank 0's pushes alone, made in place.
    const bool both = std::string(mode) == "bsp";
    REQUIRE(push(0, 0).ok());
    if (both) REQUIRE(push(1, 0).ok());
    REQUIRE(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);  // The largest number that there is.
    REQUIRE(push(0, 1).ok());
    if (both) REQUIRE(push(1, 1).ok());
    const absl::Status told = test.Answer(0, 1).status();
    CHECK(absl::IsAborted(told));
    CHECK(Message(told).find("version 2: the weights of tensor b are not finite") != std::string::npos);
    const Failures failures = test.Failures(1);
    REQUIRE(failures.size() == 1);
    CHECK(failures[0].find("the learning rate, 1, may be too large") != std::string::npos);
    CHECK(test.shard.Status(test.now).version() == 1);
    // Whoever asks from now on is told, whether the update was in place or not.
    CHECK(absl::IsAborted(test.Pull(std::nullopt).status()));
    test.NextView(v1::PHASE_FAILED, [&](v1::View* view) { view->set_failure(failures[0]); });
    CHECK(absl::IsAborted(test.Pull(std::nullopt).status()));
    CHECK(test.PullUnnamed(std::nullopt).ok() == both);
    CHECK(test.Failures(1).size() == 1);
  }
}

TEST_CASE("A limit that holds no step ends the job with the flag's name") {
  TestShard test("bsp", {.max_inflight_bytes = 31}, {{"w", {4}}}, /*run=*/false);
  const Failures failures = test.Failures(1);
  REQUIRE(failures.size() == 1);
  CHECK(failures[0].find("--max_inflight_bytes=31") != std::string::npos);
  CHECK(absl::IsAborted(test.Add(0, 0, {1, 1, 1, 1})));
}

TEST_CASE(
    "A limit that does not hold a push of each worker is refused where pushes are measured over all shards first") {
  const auto refused = [](uint64_t limit, uint32_t shards) {
    TestShard test("asp", {.num_shards = shards, .clip = {.norm = 1.0F}, .max_inflight_bytes = limit}, {{"w", {4}}},
                   /*run=*/false);
    const Failures failures = test.Failures(0);
    return !failures.empty() && failures[0].find("--max_inflight_bytes=31") != std::string::npos;
  };
  CHECK(refused(31, 2));
  CHECK_FALSE(refused(32, 2));
  CHECK_FALSE(refused(31, 1));
}

TEST_CASE("bsp: a push that needs one of a rank that is done ends the job at once") {
  for (const bool pushed_first : {false, true}) {
    CAPTURE(pushed_first);
    TestShard test("bsp");
    const auto done = [](v1::View* view) {
      view->mutable_members(1)->set_done(true);
      view->mutable_members(1)->set_name("slow");
    };
    if (!pushed_first) test.NextView(v1::PHASE_RUNNING, done);
    CHECK(test.Failures(0).empty());  // Nothing needs its push yet.
    (void)test.Add(TestShard::Header(0, 0), {});
    if (pushed_first) test.NextView(v1::PHASE_RUNNING, done);
    CHECK(test.Failures(1) == Failures{"step 0: rank 1 (slow) is done, but its push of this step is needed"});
    CHECK(absl::IsAborted(test.Add(0, 0, {1, 1, 1, 1})));
  }
}

TEST_CASE("bsp: a rank may be done once its last push is here") {
  TestShard test("bsp");
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_done(true); });
  REQUIRE(test.Add(0, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(test.Failures(0).empty());
}

TEST_CASE("bsp: a rank that was done and has left is still one that pushes nothing any more") {
  TestShard test("bsp");
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(1)->set_done(true); });
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members()->RemoveLast(); });
  (void)test.Add(0, 0, {1, 1, 1, 1});
  CHECK(test.Failures(1).size() == 1);
}

v1::HashSlicesRequest HashRequest(const v1::Identity& id, std::optional<uint64_t> version) {
  v1::HashSlicesRequest request;
  *request.mutable_id() = id;
  if (version.has_value()) request.set_version(*version);
  return request;
}

std::shared_ptr<ShardClient> Hashing(TestShard& test, Reply<v1::HashSlicesReply>& reply) {
  return ClientOf([&shard = test.shard, callback = reply.Callback()](const absl::StatusOr<ShardAnswer>& answer) {
    if (!answer.ok()) return callback(answer.status());
    shard.HashSlices(*answer->weights, callback);
  });
}

absl::StatusOr<v1::HashSlicesReply> Hashes(TestShard& test, const v1::Identity& id, std::optional<uint64_t> version) {
  PushPullSession session(test.shard, "", false, {.wait_default = {}});
  Reply<v1::HashSlicesReply> reply;
  session.PullToHash(HashRequest(id, version), Hashing(test, reply));
  test.shard.Tick(test.now);
  return reply.Wait();
}

TEST_CASE("Hashes are of exactly the version that is asked for, or of the newest") {
  TestShard test("asp");
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  REQUIRE(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(Hashes(test, {}, 1)->version() == 1);
  CHECK(Hashes(test, TestShard::Id(0), std::nullopt)->version() == 1);
  CHECK(absl::IsDeadlineExceeded(Hashes(test, {}, 2).status()));
  CHECK(absl::IsFailedPrecondition(Hashes(test, {}, 0).status()));
  CHECK(Message(Hashes(test, TestShard::Id(0, 9), 1).status()).find("fenced") != std::string::npos);

  Reply<v1::HashSlicesReply> next;
  PushPullSession session(test.shard, "", false, {});
  session.PullToHash(HashRequest({}, 2), Hashing(test, next));
  REQUIRE(test.Add(0, 1, {1, 0, 0, 0}).ok());
  CHECK(next.Wait()->version() == 2);
}

TEST_CASE("A shard that is cut off from its chief is not available, and serves again when it has it back") {
  TestShard test("asp");
  test.shard.SetChiefLost(true);
  const absl::Status refused = test.Add(0, 0, {1, 0, 0, 0});
  CHECK(absl::IsUnavailable(refused));
  CHECK(Message(refused).find("shard 0 has lost its connection to the chief") != std::string::npos);
  test.shard.SetChiefLost(false);
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("When the job is finished its weights are still read, by everybody, and nothing is waited for") {
  TestShard test("asp", {.max_versions = 1});
  REQUIRE(test.Add(0, 0, {1, 0, 0, 0}).ok());
  REQUIRE(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
  CHECK(absl::IsFailedPrecondition(test.PullUnnamed(1).status()));
  Reply<VersionPin> far;
  test.AwaitPull({.id = TestShard::Id(0), .peer = ""}, 7, TestShard::kLong, far.Callback());
  test.NextView(v1::PHASE_FINISHED, [](v1::View* view) { view->clear_members(); });
  CHECK(absl::IsFailedPrecondition(far.Wait().status()));
  test.shard.SetChiefLost(true);  // It has ended, too.
  CHECK(test.PullUnnamed(1)->weights()[0] == 0);
  CHECK(test.Pull(std::nullopt)->version() == 1);
  CHECK(Hashes(test, {}, std::nullopt)->version() == 1);
  CHECK(absl::IsFailedPrecondition(test.PullUnnamed(2).status()));
  CHECK(absl::IsFailedPrecondition(test.Add(0, 1, {1, 0, 0, 0})));
  test.shard.Shutdown(absl::FailedPreconditionError("the job is finished"));
  CHECK_FALSE(test.PullUnnamed(1).ok());
}

TEST_CASE("When the job has failed, its members are told why, and others may look at what is left") {
  TestShard test("asp");
  test.NextView(v1::PHASE_FAILED, [](v1::View* view) { view->set_failure("rank 1 was lost"); });
  CHECK(absl::IsAborted(test.Pull(std::nullopt).status()));
  CHECK(test.PullUnnamed(std::nullopt)->weights()[0] == 1);
  CHECK(Hashes(test, {}, 0)->version() == 0);
  CHECK(Message(test.PullUnnamed(1).status()).find("rank 1 was lost") != std::string::npos);
  // A job that failed before it had weights has nothing to show.
  TestShard early("asp", {}, {{"w", {4}}}, /*run=*/false);
  early.NextView(v1::PHASE_FAILED, [](v1::View* view) { view->set_failure("stopped"); });
  CHECK(absl::IsAborted(early.PullUnnamed(std::nullopt).status()));
}

TEST_CASE("A job that is reset before it runs takes another layout and other initial values") {
  TestShard test("bsp", {}, {{"w", {4}}}, /*run=*/false);
  REQUIRE(test.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
  test.NextView(v1::PHASE_GATHERING, [](v1::View* view) {
    view->clear_members();
    view->clear_layout();
  });
  CHECK(test.shard.Status(test.now).slices() == 0);
  {
    MutexLock lock(test.reports_mutex);
    CHECK(test.reports[test.reports.size() - 2].initialised());
    CHECK_FALSE(test.reports.back().initialised());
    CHECK(test.reports.back().acknowledged_view() == 3);
  }
  const auto other = [](v1::View* view) { *view->mutable_layout() = ToProto({{"v", {2}}, {"u", {3}}}); };
  test.NextView(v1::PHASE_GATHERING, other);
  CHECK_FALSE(test.shard.CheckInitialised().ok());
  REQUIRE(test.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {5, 6}), TestShard::Slice(1, {7, 8, 9})})
              .ok());
  test.NextView(v1::PHASE_RUNNING, other);
  const auto pin = test.Pull(0);
  REQUIRE(pin.ok());
  CHECK(pin->weights().size() >= 5);
  CHECK(test.shard.Status(test.now).bytes() == 20);
}

TEST_CASE("A shard that failed before the job ran may be read, and is not reset while it is") {
  TestShard test("asp", {}, {{"w", {4}}}, /*run=*/false);
  REQUIRE(test.shard.AddInitialSlices(TestShard::Id(0), {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
  test.shard.ReportFailure("server 1 was stopped (SIGTERM)");
  const auto pin = test.PullUnnamed(std::nullopt);
  REQUIRE(pin.ok());
  test.NextView(v1::PHASE_GATHERING, [](v1::View* view) {
    view->clear_members();
    view->clear_layout();
  });
  CHECK(pin->weights()[0] == 1);
  CHECK(test.PullUnnamed(std::nullopt).ok());
}

}  // namespace
}  // namespace ps
