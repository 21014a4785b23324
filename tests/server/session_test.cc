// Sessions in process, on one shard.
#include "server/shard/push_pull_session.h"

#include <memory>
#include <thread>

#include "common/status.h"
#include "server/shard/waiters.h"
#include "tests/server/test_shard.h"

namespace ps {
namespace {

using SessionReply = Reply<ShardAnswer>;

TEST_CASE("A push_pull asks once: the answer to its push comes with the weights that its step makes") {
  TestShard test("bsp");
  PushPullSession session(test.shard, "", false, {});
  REQUIRE(session.Add(TestShard::Header(0, 0), {TestShard::Slice(0, {2, 2, 2, 2})}).ok());
  SessionReply reply;
  session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  CHECK(test.shard.Status(test.now).parked() == 1);
  REQUIRE(test.Add(1, 0, {4, 4, 4, 4}).ok());
  const auto answer = reply.Wait();
  REQUIRE(answer.ok());
  CHECK(answer->push->answer() == v1::ANSWER_APPLIED);
  CHECK(answer->weights->version() == 1);
  CHECK(answer->weights->slice(0)[3] == 1 - 3);
}

TEST_CASE("In asp a push_pull brings the newest version, and a push alone brings none") {
  TestShard test("asp");
  for (const bool weights : {true, false}) {
    CAPTURE(weights);
    PushPullSession session(test.shard, "", false, {});
    REQUIRE(session.Add(TestShard::Header(0, weights ? 0 : 1), {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
    SessionReply reply;
    session.Finish(weights, ClientOf(reply.Callback()));
    const auto answer = reply.Wait();
    REQUIRE(answer.ok());
    CHECK(answer->push->answer() == v1::ANSWER_APPLIED);
    CHECK(answer->weights.has_value() == weights);
  }
}

TEST_CASE("A session whose push did not ask for slices, or that never began one, lets go of who would take them") {
  TestShard test("bsp");
  for (const bool pushes : {false, true}) {
    CAPTURE(pushes);
    const std::shared_ptr<ShardClient> taker = ClientOf({});
    PushPullSession session(test.shard, "", false, {});
    if (pushes) {
      REQUIRE(session.Add(TestShard::Header(0, 0), {TestShard::Slice(0, {2, 2, 2, 2})}, taker).ok());
      SessionReply reply;
      session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
      REQUIRE(test.Add(1, 0, {4, 4, 4, 4}).ok());
      REQUIRE(reply.Wait().ok());
    }
    session.Over();
    CHECK(taker.use_count() == 1);
  }
}

// A session that its own client keeps alive, as a transport's is.
TEST_CASE("A session that ends with its answer ends without the shard's lock") {
  TestShard test("bsp");
  for (uint64_t step = 0; step < 200; ++step) {
    auto session = std::make_shared<PushPullSession>(test.shard, "", /*this_host=*/true, WaitLimits{});
    REQUIRE(session->Add(TestShard::Header(0, step), {TestShard::Slice(0, {2, 2, 2, 2})}).ok());
    SessionReply reply;
    PushPullSession& open = *session;
    open.Finish(/*weights=*/true, ClientOf([session = std::move(session), callback = reply.Callback()](
                                               absl::StatusOr<ShardAnswer> answer) { callback(std::move(answer)); }));
    std::thread other([&] { test.shard.Tick(test.now); });  // It may be at the outbox.
    REQUIRE(test.Add(1, step, {4, 4, 4, 4}).ok());
    REQUIRE(reply.Wait().ok());
    other.join();
  }
}

TEST_CASE("A push_pull that is FENCED gets no weights") {
  TestShard test("asp");
  test.NextView(v1::PHASE_RUNNING, [](v1::View* view) { view->mutable_members(0)->set_incarnation(2); });
  PushPullSession session(test.shard, "", false, {});
  REQUIRE(session.Add(TestShard::Header(0, 0), {}).ok());
  SessionReply reply;
  session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
  CHECK(reply.Wait()->push->answer() == v1::ANSWER_FENCED);
  CHECK_FALSE(reply.Wait()->weights.has_value());
}

TEST_CASE("One session carries one push, and one that carries none is told so") {
  TestShard test("asp");
  PushPullSession session(test.shard, "", false, {});
  REQUIRE(session.Add(TestShard::Header(0, 0), {}).ok());
  const absl::Status other = session.Add(TestShard::Header(1, 0), {});
  CHECK(Message(other) ==
        "rank 0, incarnation 1, step 0, samples 1, version 0, contribution 0: the call also carries rank 1, "
        "incarnation 1, step 0, "
        "samples 1, version 0, contribution 0");
  CHECK(absl::IsInvalidArgument(session.Add(TestShard::Header(0, 0, /*samples=*/7), {})));

  PushPullSession silent(test.shard, "", false, {});
  SessionReply reply;
  silent.Finish(/*weights=*/false, ClientOf(reply.Callback()));
  CHECK(Message(reply.Wait().status()) == "the call ended without a message");
}

TEST_CASE("A client that goes frees its place, whenever it goes, and its complete push still counts") {
  TestShard test("bsp");
  for (const bool before : {false, true}) {
    CAPTURE(before);
    PushPullSession session(test.shard, "", false, {});
    REQUIRE(session.Add(TestShard::Header(0, 0), {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
    SessionReply reply;
    if (before) session.Gone();
    session.Finish(/*weights=*/true, ClientOf(reply.Callback()));
    if (!before) session.Gone();
    CHECK(absl::IsCancelled(reply.Wait().status()));
    CHECK(test.shard.Status(test.now).parked() == 0);
  }
  REQUIRE(test.Add(1, 0, {1, 1, 1, 1}).ok());
  CHECK(test.Answer(0, 0)->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("While another session may bring the rest, an incomplete push is kept") {
  TestShard test("asp");
  PushPullSession session(test.shard, "", false, {});
  v1::PushRequest header = TestShard::Header(0, 0);
  header.set_calls(2);
  REQUIRE(session.Add(header, {}).ok());
  SessionReply reply;
  session.Finish(/*weights=*/false, ClientOf(reply.Callback()));
  PushPullSession other(test.shard, "", false, {});
  REQUIRE(other.Add(header, {TestShard::Slice(0, {1, 1, 1, 1})}).ok());
  CHECK(reply.Wait()->push->answer() == v1::ANSWER_APPLIED);
}

TEST_CASE("A request may name its time, up to a limit") {
  TestShard test("asp");
  PushPullSession session(test.shard, "ipv4:10.0.0.1:5", false,
                          {.wait_default = {}, .wait_max = std::chrono::seconds(2)});
  v1::PullRequest request;
  request.set_version(9);
  request.set_wait_ms(1000000);
  SessionReply reply;
  session.Pull(request, ClientOf(reply.Callback()));
  test.shard.Tick(test.now + std::chrono::milliseconds(1999));
  CHECK(test.shard.Status(test.now).parked() == 1);
  test.shard.Tick(test.now + std::chrono::seconds(2));
  CHECK(absl::IsDeadlineExceeded(reply.Wait().status()));
  CHECK(Message(reply.Wait().status()).find("a reader at ipv4:10.0.0.1:5 waited 2.0 s for version 9") !=
        std::string::npos);
}

TEST_CASE("What an update waits for is told when it takes long, again and again, and when it is over") {
  StallReport stall;
  const TimePoint start = TimePoint() + std::chrono::hours(1);
  const auto at = [&](int ms) { return start + std::chrono::milliseconds(ms); };
  stall.Heard(1, start);
  CHECK(stall.DescribeRanks(4, {{1, "evaluating"}, {2, ""}}, at(2500)) ==
        "step 4: waiting for rank 1 (evaluating, last heard from 2.5 s ago), rank 2 (not heard from yet)");
  const auto name = [] { return std::string("ranks"); };
  const StallReport::Situation ranks = {.step = 4, .ranks = name, .blocked_since = {}, .readers = ""};
  CHECK_FALSE(stall.Update(ranks, at(0)));
  CHECK_FALSE(stall.Update(ranks, at(5000)));
  CHECK(stall.Update(ranks, at(5001)));
  CHECK(stall.text() == "ranks");
  CHECK_FALSE(stall.Update(ranks, at(5999)));
  CHECK(stall.Update(ranks, at(6001)));
  CHECK(stall.Update({.step = 5, .ranks = name, .blocked_since = {}, .readers = ""}, at(6100)));
  CHECK(stall.text().empty());
  CHECK_FALSE(stall.Update({}, at(6200)));
  const StallReport::Situation blocked = {.step = {}, .ranks = {}, .blocked_since = at(7000), .readers = "readers"};
  CHECK_FALSE(stall.Update(blocked, at(8000)));
  CHECK(stall.Update(blocked, at(8001)));
  CHECK(stall.text() == "readers");
}

}  // namespace
}  // namespace ps
