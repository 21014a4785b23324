// What an exchange does when calls fail: which are made again, what of them counts, and what the user is told.
#include "tests/client/test_exchange.h"

namespace ps {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Slices = std::vector<uint32_t>;

TEST_CASE("Every status of a call ends the exchange with the shard's name, or the call is made again") {
  for (int code = 1; code <= 16; ++code) {
    const auto status_code = static_cast<absl::StatusCode>(code);
    // CANCELLED is the server's: nothing in this client cancelled the call.
    const bool again = status_code == absl::StatusCode::kCancelled || status_code == absl::StatusCode::kUnavailable ||
                       status_code == absl::StatusCode::kDeadlineExceeded ||
                       status_code == absl::StatusCode::kResourceExhausted;
    INFO(absl::StatusCodeToString(status_code));
    TestExchange test(2);
    TestRequest request(CallKind::kPushPull);
    test.Begin(request.request);
    test.call(1).End(absl::Status(status_code, "so it is"));
    test.timer.Advance(seconds(1));
    if (again) {
      CHECK(test.link(1).calling());
      CHECK(test.link(1).calls.size() == 2);
      CHECK_FALSE(test.call(0).cancelled);
    } else {
      CHECK(test.call(0).cancelled);
      test.call(0).End(absl::CancelledError(""));
      CHECK(test.status().code() == status_code);
      CHECK(Text(test.status()) == "shard 1 at host-1:5000: so it is");
      CHECK(test.link(1).calls.size() == 1);
    }
  }
}

TEST_CASE("Only the shard whose call failed is asked again") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  test.Answer(0, 8, 1);
  test.call(1).End(kUnavailable);
  test.timer.Advance(seconds(1));
  test.Answer(1, 8, 1, PushAnswer::kDuplicate);
  CHECK(test.status().ok());
  CHECK(test.link(0).calls.size() == 1);
  CHECK(test.link(1).calls.size() == 2);
}

TEST_CASE("The next attempt comes after its pause, not before") {
  TestExchange test;
  TestRequest request(CallKind::kPull);
  test.Begin(request.request);
  for (const int pause : {40, 80, 160, 320, 640, 1000}) {
    test.call().End(kUnavailable);
    test.timer.Advance(milliseconds(pause) - std::chrono::nanoseconds(1));
    CHECK_FALSE(test.link().calling());
    test.timer.Advance(std::chrono::nanoseconds(1));
    CHECK(test.link().calling());
  }
}

TEST_CASE("Initial values that are sent again are all sent again") {
  TestExchange test(2);
  TestRequest request(CallKind::kInit);
  test.Begin(request.request);
  test.Answer(0, 0, 0);
  CHECK(test.call(1).sent == Slices{1, 2, 3});
  test.call(1).End(kUnavailable);
  test.timer.Advance(seconds(1));
  REQUIRE(test.link(1).calls.size() == 2);
  CHECK(test.call(1).sent == Slices{1, 2, 3});
  CHECK(test.call(1).last);
  test.Answer(1, 0, 0);
  CHECK(test.status().ok());
}

TEST_CASE("A push that is made again sends what was sent before and what has become ready since") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(2);
  exchange->TensorReady(1);
  test.call().End(kUnavailable);
  exchange->TensorReady(0);  // While it sleeps.
  test.timer.Advance(seconds(1));
  CHECK(test.call().sent == Slices{3, 2, 0, 1});
  CHECK(test.call().last);
  CHECK(test.call().request.step == 7);
  test.Answer(0, 8, 1, PushAnswer::kDuplicate);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->answers == std::vector<PushAnswer>{PushAnswer::kDuplicate});
}

TEST_CASE("In a synchronous mode slices that have come are not written again by another attempt") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  const auto exchange = test.Begin(request.request);
  test.call().reply.version = 8;
  CHECK(test.call().Receive(2, 1));
  CHECK(exchange->WaitTensor(1).ok());
  test.call().End(kUnavailable);
  test.timer.Advance(seconds(1));
  CHECK_FALSE(test.call().Receive(2, 99));
  for (const uint32_t slice : {0U, 1U, 3U}) CHECK(test.call().Receive(slice, 1));
  test.call().reply.version = 8;
  test.call().reply.answer = PushAnswer::kDuplicate;
  test.call().End(absl::OkStatus());
  CHECK(test.status().ok());
  CHECK(request.weights[1][0] == 1);
}

TEST_CASE("In an asynchronous mode another attempt brings all slices anew, and its version counts") {
  TestExchange test(1, /*exact_versions=*/false);
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  test.call().reply.version = 8;
  CHECK(test.call().Receive(2, 1));
  test.call().End(kUnavailable);
  test.timer.Advance(seconds(1));
  test.Answer(0, 12, 3);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->version == 12);
  CHECK(request.weights[1][0] == 3);
}

TEST_CASE("A synchronous exchange is never made of two versions") {
  for (const bool succeeds : {true, false}) {
    TestExchange test;
    TestRequest request(CallKind::kPushPull);
    test.Begin(request.request);
    test.call().reply.version = 8;
    (void)test.call().Receive(2, 1);
    test.call().End(kUnavailable);
    test.timer.Advance(seconds(1));
    test.call().reply.version = 9;
    test.call().reply.answer = PushAnswer::kApplied;
    for (const uint32_t slice : {0U, 1U, 2U, 3U}) (void)test.call().Receive(slice, 1);
    test.call().End(succeeds ? absl::OkStatus() : kUnavailable);
    CHECK(absl::IsInternal(test.status()));
    CHECK(Text(test.status()).find("version 9 instead of 8") != std::string::npos);
  }
}

TEST_CASE("A pull of one version takes no other") {
  TestExchange test;
  TestRequest request(CallKind::kPull);
  request.request.version = 5;
  test.Begin(request.request);
  CHECK(test.call().request.exact_version == std::optional<uint64_t>(5));
  test.Answer(0, 6, 1);
  CHECK(absl::IsInternal(test.status()));
}

TEST_CASE("A shard that ends a call well but leaves out slices or the answer is an error") {
  TestExchange partial;
  TestRequest request(CallKind::kPushPull);
  partial.Begin(request.request);
  partial.call().reply.answer = PushAnswer::kApplied;
  (void)partial.call().Receive(1, 1);
  partial.call().End(absl::OkStatus());
  CHECK(absl::IsInternal(partial.status()));
  CHECK(Text(partial.status()) == "shard 0 at host-0:5000: it sent 1 of its 4 slices");

  TestExchange mute;
  TestRequest push(CallKind::kPush);
  mute.Begin(push.request);
  mute.Answer(0, 8, 1, PushAnswer::kNone);
  CHECK(absl::IsInternal(mute.status()));
}

TEST_CASE("A fenced push ends the exchange by rank, incarnation and generation") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  test.call(1).reply.answer = PushAnswer::kFenced;
  test.call(1).reply.generation = 4;
  test.call(1).End(absl::OkStatus());
  CHECK(test.call(0).cancelled);
  test.call(0).End(absl::CancelledError(""));
  CHECK(absl::IsFailedPrecondition(test.status()));
  CHECK(Text(test.status()).find("rank 3, incarnation 11: fenced by shard 1") != std::string::npos);
  CHECK(Text(test.status()).find("generation 4") != std::string::npos);
}

TEST_CASE("A call on which nothing moves for too long is cancelled and made again, once the gradients are there") {
  TestExchange test;
  test.context->patience.longest = std::chrono::minutes(5);
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  test.timer.Advance(std::chrono::hours(1));
  exchange->CheckProgress();
  CHECK_FALSE(test.call().cancelled);
  for (size_t tensor = 0; tensor < kTestLayout.size(); ++tensor) exchange->TensorReady(tensor);
  // The wait at the server, a margin, and a message at the slowest rate.
  constexpr seconds kLimit = kTestNoticeEvery + seconds(10) + seconds(32);
  test.timer.Advance(kLimit);
  exchange->CheckProgress();
  CHECK_FALSE(test.call().cancelled);
  test.call().Move();
  test.timer.Advance(kLimit);
  exchange->CheckProgress();
  CHECK_FALSE(test.call().cancelled);
  test.timer.Advance(milliseconds(1));
  exchange->CheckProgress();
  CHECK(test.call().cancelled);
  test.call().End(absl::CancelledError(""));
  CHECK(test.notices == std::vector<std::string>{"shard 0 at host-0:5000: no progress for too long; retrying"});
  test.timer.Advance(seconds(1));
  CHECK(test.link().calling());
  CHECK(test.call().last);
  CHECK_FALSE(test.call().cancelled);
}

TEST_CASE("The user is told whom a shard waits for, and what is wrong with one that cannot be reached") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  test.timer.Advance(seconds(10));
  test.call().End(absl::DeadlineExceededError("step 7: waiting for rank 1"));
  test.timer.RunDue();
  test.call().End(kUnavailable);
  test.timer.Advance(milliseconds(40));
  test.call().End(kUnavailable);
  test.timer.Advance(milliseconds(80));
  test.call().End(absl::CancelledError(""));
  test.timer.Advance(seconds(3));
  test.call().End(absl::CancelledError(""));
  CHECK(test.notices == std::vector<std::string>{"step 7: waiting for rank 1",
                                                 "shard 0 at host-0:5000: connection refused; retrying",
                                                 "shard 0 at host-0:5000: the server cancelled the call; retrying"});
}

}  // namespace
}  // namespace ps
