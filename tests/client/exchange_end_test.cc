// How an exchange ends before it succeeds: it is given up, or stopped, in whatever state it is. And what the end means.
#include "common/clock.h"
#include "tests/client/test_exchange.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const absl::Status kStopped = absl::CancelledError("stopped");

TEST_CASE("A stop ends an exchange that sleeps between two attempts at once, and no call is made any more") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  const auto exchange = test.Begin(request.request);
  test.call().End(kUnavailable);
  exchange->Abort(kStopped);
  CHECK(exchange->Wait().status() == kStopped);  // Without time passing.
  CHECK(test.status() == kStopped);
  test.timer.Advance(seconds(10));
  CHECK(test.link().calls.size() == 1);
}

TEST_CASE("A stop while one shard sleeps and another is asked waits for the other's call only") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  const auto exchange = test.Begin(request.request);
  test.call(0).End(kUnavailable);
  exchange->Abort(kStopped);
  CHECK_FALSE(test.ended());
  CHECK(test.call(1).cancelled);
  test.call(1).End(absl::CancelledError(""));
  CHECK(test.status() == kStopped);
  test.timer.Advance(seconds(10));
  CHECK(test.link(0).calls.size() == 1);
  CHECK(test.link(1).calls.size() == 1);
}

TEST_CASE("An exchange that is stopped before it begins makes no call") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  const auto exchange = std::make_shared<RetryingExchange>(test.context, test.timer, request.request, nullptr);
  exchange->Abort(kStopped);
  exchange->Begin();
  CHECK(exchange->Wait().status() == kStopped);
  CHECK(test.link().calls.empty());
}

TEST_CASE("An exchange has not ended before nothing uses its memory any more") {
  TestExchange test(2);
  TestRequest request(CallKind::kPush);
  test.Begin(request.request);
  for (const uint32_t shard : {0U, 1U}) {
    test.call(shard).reply.answer = PushAnswer::kApplied;
    test.call(shard).End(absl::OkStatus(), /*keep_memory=*/shard == 0);
  }
  CHECK_FALSE(test.ended());
  test.call(0).ReleaseMemory();
  CHECK(test.status().ok());
}

TEST_CASE("Memory that an earlier attempt still uses holds up the end, too") {
  TestExchange test;
  TestRequest request(CallKind::kPush);
  test.Begin(request.request);
  const std::shared_ptr<FakeShardCall> first = test.link().calls[0];
  first->End(kUnavailable, /*keep_memory=*/true);
  test.timer.Advance(seconds(1));
  test.Answer(0, 8, 0, PushAnswer::kDuplicate);
  CHECK_FALSE(test.ended());
  first->ReleaseMemory();
  CHECK(test.status().ok());
}

TEST_CASE("The first end counts, and the callback is called once") {
  TestExchange test;
  TestRequest request(CallKind::kPull);
  int called = 0;
  const auto exchange = std::make_shared<RetryingExchange>(test.context, test.timer, request.request,
                                                           [&called](const auto& /*result*/) { ++called; });
  exchange->Begin();
  exchange->Abort(kStopped);
  exchange->Abort(absl::AbortedError("the job failed"));
  test.Answer(0, 8, 1);
  test.timer.RunDue();
  CHECK(exchange->Wait().status() == kStopped);
  CHECK(called == 1);
}

TEST_CASE("A client that shuts down makes no further attempt") {
  TestExchange test;
  TestRequest request(CallKind::kPull);
  const auto exchange = test.Begin(request.request);
  test.timer.Stop();
  test.call().End(kUnavailable);
  CHECK(absl::IsCancelled(exchange->Wait().status()));
}

TEST_CASE("At its time an exchange is given up while a shard waits, is full, breaks or is silent") {
  struct Case {
    absl::Status call_ends;
    seconds after;
    absl::StatusCode expected;
  };
  // The call's own deadline is far beyond: its wait, a margin, and the time of its bytes.
  for (const Case& each :
       {Case{absl::DeadlineExceededError("waiting for rank 1"), seconds(5), absl::StatusCode::kDeadlineExceeded},
        Case{absl::ResourceExhaustedError("full"), seconds(5), absl::StatusCode::kDeadlineExceeded},
        Case{kUnavailable, seconds(5), absl::StatusCode::kUnavailable},
        Case{absl::DeadlineExceededError(""), seconds(100), absl::StatusCode::kUnavailable}}) {
    INFO(each.call_ends);
    TestExchange test;
    TestRequest request(CallKind::kPull);
    request.request.give_up = test.timer.now() + seconds(5);
    test.Begin(request.request);
    CHECK(test.call().request.wait == seconds(5));
    test.timer.Advance(each.after);
    test.call().End(each.call_ends);
    CHECK(test.status().code() == each.expected);
    CHECK(Text(test.status()).find("shard 0 at host-0:5000: ") != std::string::npos);
  }
}

TEST_CASE("An exchange whose time is over while it sleeps asks once more, for a short wait") {
  TestExchange test;
  TestRequest request(CallKind::kPull);
  request.request.give_up = test.timer.now() + milliseconds(30);
  test.Begin(request.request);
  test.call().End(kUnavailable);
  test.timer.Advance(milliseconds(40));
  REQUIRE(test.link().calling());
  CHECK(test.call().request.wait == milliseconds(20));
  SECTION("and ends with the answer") {
    test.Answer(0, 8, 1);
    CHECK(test.status().ok());
  }
  SECTION("and is given up") {
    test.call().End(kUnavailable);
    CHECK(absl::IsUnavailable(test.status()));
    CHECK(Text(test.status()).find("--connect_timeout") == std::string::npos);
  }
}

TEST_CASE("A shard that cannot be reached is given up after connect_timeout, by its address and the flag") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  int attempts = 0;
  for (; attempts < 100 && !test.ended(); ++attempts) {
    test.call().End(kUnavailable);
    test.timer.Advance(seconds(1));
  }
  CHECK(attempts == 32);  // One a second and a moment at the end.
  CHECK(absl::IsUnavailable(test.status()));
  CHECK(Text(test.status())
            .find("rank 3, step 7: shard 0 at host-0:5000: not reachable for 31 s (--connect_timeout): "
                  "connection refused") == 0);
}

TEST_CASE("A shard that takes what it is sent and is silent then is given up after the flag's own time") {
  for (const seconds patience : {seconds(6), seconds(30)}) {
    for (const CallKind kind : {CallKind::kPull, CallKind::kPushPull}) {
      TestExchange test;
      test.context->patience.longest = patience;
      TestRequest request(kind);
      const auto exchange = test.Begin(request.request);
      CHECK(test.call().request.wait <= patience / 2);  // One that is alive answers in time.
      test.timer.Advance(patience);
      exchange->CheckProgress();
      CHECK_FALSE(test.call().cancelled);
      test.timer.Advance(milliseconds(1));
      exchange->CheckProgress();
      REQUIRE(test.call().cancelled);
      test.call().End(absl::CancelledError(""));
      CHECK(absl::IsUnavailable(test.status()));
      const std::string text = "shard 0 at host-0:5000: not reachable for " + FormatSeconds(patience) +
                               " (--connect_timeout): no progress for too long";
      CHECK(Text(test.status()).find(text) != std::string::npos);
    }
  }
}

TEST_CASE("A message may take 10 s and a second for each 32 KiB, whatever the patience with silent shards") {
  for (const seconds patience : {seconds(15), seconds(30), seconds(600)}) {
    for (const CallKind kind : {CallKind::kPull, CallKind::kPushPull}) {
      TestExchange test;
      test.context->patience.longest = patience;
      TestRequest request(kind);
      const auto exchange = test.Begin(request.request);
      test.call().unseen = 1 << 20;
      for (int messages = 0; messages < 5; ++messages) {
        test.timer.Advance(seconds(10 + 32));
        exchange->CheckProgress();
        CHECK_FALSE(test.call().cancelled);
        test.call().Move();
      }
      test.timer.Advance(std::min(patience, seconds(20)) + seconds(32) + milliseconds(1));
      exchange->CheckProgress();
      CHECK(test.call().cancelled);
    }
  }
}

TEST_CASE("While gradients are being computed no shard is given up, and its time begins with the last of them") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  for (int i = 0; i < 100; ++i) {
    test.call().End(kUnavailable);
    test.timer.Advance(seconds(1));
  }
  CHECK_FALSE(test.ended());
  for (size_t tensor = 0; tensor < kTestLayout.size(); ++tensor) exchange->TensorReady(tensor);
  test.timer.Advance(seconds(30));
  test.call().End(kUnavailable);
  test.timer.Advance(seconds(1));
  CHECK_FALSE(test.ended());
  test.call().End(kUnavailable);
  CHECK(absl::IsUnavailable(test.status()));
}

TEST_CASE("A shard whose bytes move is not given up, however often its calls break") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  for (int i = 0; i < 100; ++i) {
    test.timer.Advance(seconds(5));
    test.call().Move();
    test.timer.Advance(seconds(5));
    test.call().End(kUnavailable);
    test.timer.Advance(seconds(1));
  }
  CHECK_FALSE(test.ended());
  test.Answer(0, 8, 1);
  CHECK(test.status().ok());
}

}  // namespace
}  // namespace ps
