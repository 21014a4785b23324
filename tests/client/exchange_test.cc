// What an exchange sends and brings when nothing fails, and what it refuses.
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "tests/client/test_exchange.h"

namespace ps {
namespace {

using Slices = std::vector<uint32_t>;

TEST_CASE("A push_pull asks every shard at once, and its result has every shard's version and answer") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  test.Begin(request.request);
  for (const uint32_t shard : {0U, 1U}) {
    CHECK(test.call(shard).request.kind == CallKind::kPushPull);
    CHECK(test.call(shard).request.step == 7);
    CHECK(test.call(shard).request.samples == 4);
    CHECK(test.call(shard).last);
  }
  CHECK(test.call(0).sent == Slices{0});
  CHECK(test.call(1).sent == Slices{1, 2, 3});
  test.Answer(0, 8, 1.5F);
  CHECK_FALSE(test.ended());
  test.Answer(1, 8, 1.5F, PushAnswer::kDuplicate);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->version == 8);
  CHECK((*test.result)->versions == std::vector<uint64_t>{8, 8});
  CHECK((*test.result)->answers == std::vector<PushAnswer>{PushAnswer::kApplied, PushAnswer::kDuplicate});
  for (const auto& weights : request.weights) {
    for (const float weight : weights) REQUIRE(weight == 1.5F);
  }
}

TEST_CASE("Of shards at different versions the result's version is the lowest") {
  TestExchange test(2, /*exact_versions=*/false);
  TestRequest request(CallKind::kPull);
  test.Begin(request.request);
  test.Answer(0, 9, 1);
  test.Answer(1, 6, 1);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->version == 6);
  CHECK((*test.result)->versions == std::vector<uint64_t>{9, 6});
  CHECK((*test.result)->answers.empty());
}

TEST_CASE("The hyperparameters that come with weights are those that shard 0 tells") {
  TestExchange test(2, /*exact_versions=*/false);
  TestRequest request(CallKind::kPull);
  test.Begin(request.request);
  test.call(0).reply.hyperparameters = {{"learning_rate", 0.5F}};
  test.call(1).reply.hyperparameters = {{"learning_rate", 0.25F}};
  test.Answer(0, 9, 1);
  test.Answer(1, 6, 1);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->hyperparameters == std::map<std::string, float>{{"learning_rate", 0.5F}});
}

TEST_CASE("Each shard is told the version that the gradient was computed on there") {
  TestExchange test(2, /*exact_versions=*/false);
  TestRequest request(CallKind::kPush);
  request.request.push.versions = {21, 17};
  test.Begin(request.request);
  CHECK(test.call(0).request.version == 21);
  CHECK(test.call(1).request.version == 17);
}

TEST_CASE("Deferred gradients are sent as they become ready, each to its shard, and all shards are told of the last") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  CHECK(test.call(0).sent.empty());
  exchange->TensorReady(2);
  CHECK(test.call(1).sent == Slices{3});
  exchange->TensorReady(1);
  CHECK(test.call(1).sent == Slices{3, 2});
  CHECK(test.call(0).sent.empty());
  CHECK_FALSE(test.call(0).last);
  CHECK_FALSE(test.call(1).last);
  exchange->TensorReady(0);
  CHECK(test.call(0).sent == Slices{0});
  CHECK(test.call(1).sent == Slices{3, 2, 1});
  CHECK(test.call(0).last);
  CHECK(test.call(1).last);
}

TEST_CASE("A synchronous exchange hands over each tensor as soon as all of its slices are there") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  const auto exchange = test.Begin(request.request);
  (void)test.call(1).Receive(3, 2);
  CHECK(exchange->WaitTensor(2).ok());
  (void)test.call(0).Receive(0, 2);
  (void)test.call(1).Receive(1, 2);
  CHECK(exchange->WaitTensor(0).ok());
  CHECK(request.weights[0].back() == 2);
  exchange->Abort(absl::CancelledError("stopped"));
  for (const uint32_t shard : {0U, 1U}) test.call(shard).End(absl::CancelledError(""));
  CHECK(absl::IsCancelled(exchange->WaitTensor(1)));
  CHECK(exchange->WaitTensor(0).ok());
}

TEST_CASE("An empty contribution is a header without slices, whatever is said to be ready") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  request.request.push.samples = 0;
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);
  CHECK(test.call().sent.empty());
  CHECK(test.call().last);
  test.Answer(0, 8, 1);
  CHECK(test.status().ok());
}

TEST_CASE("The times of an exchange begin with its last gradient and add up") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  test.timer.Advance(std::chrono::seconds(5));
  for (size_t tensor = 0; tensor < kTestLayout.size(); ++tensor) exchange->TensorReady(tensor);
  test.timer.Advance(std::chrono::seconds(3));
  (void)test.call().Receive(0, 1);
  test.timer.Advance(std::chrono::seconds(1));
  for (const uint32_t slice : {1U, 2U, 3U}) (void)test.call().Receive(slice, 1);
  test.call().reply.answer = PushAnswer::kApplied;
  test.call().reply.waited_us = 2'000'000;
  test.call().End(absl::OkStatus());
  REQUIRE(test.status().ok());
  CHECK((*test.result)->push_s == Approx(1));
  CHECK((*test.result)->wait_s == Approx(2));
  CHECK((*test.result)->pull_s == Approx(1));
}

TEST_CASE("A push that is answered before all of it is ready has taken no time, and the rest is not sent") {
  TestExchange test;
  TestRequest request(CallKind::kPush);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(2);
  test.Answer(0, 9, 0, PushAnswer::kDuplicate);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->push_s == 0);
  CHECK((*test.result)->wait_s == 0);
  exchange->TensorReady(0);
  CHECK(test.call().sent == Slices{3});
}

TEST_CASE("A gradient that is not finite ends the exchange by its tensor, and nothing behind it is sent") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  request.gradients[0].back() = std::nanf("");  // In its second slice, and both are looked at together.
  test.Begin(request.request);
  CHECK(test.call().sent.empty());
  CHECK_FALSE(test.call().last);
  CHECK(test.call().cancelled);
  test.call().End(absl::CancelledError(""));
  CHECK(absl::IsInvalidArgument(test.status()));
  CHECK(Text(test.status()).find("rank 3, step 7: the gradient of tensor a") != std::string::npos);
}

TEST_CASE("A tensor that is ready twice, or that does not exist, ends the exchange") {
  for (const size_t tensor : {size_t{1}, size_t{3}}) {
    TestExchange test;
    TestRequest request(CallKind::kPush);
    request.request.deferred = true;
    const auto exchange = test.Begin(request.request);
    exchange->TensorReady(1);
    exchange->TensorReady(tensor);
    test.call().End(absl::CancelledError(""));
    CHECK(absl::IsInvalidArgument(test.status()));
  }
}

TEST_CASE("A request that does not fit the model or the shards is refused by what is wrong with it") {
  const auto problem = [](const ExchangeRequest& request) {
    TestExchange test(2);
    return Text(std::make_shared<RetryingExchange>(test.context, test.timer, request, nullptr)->CheckRequest());
  };
  TestRequest good(CallKind::kPushPull);
  CHECK(problem(good.request).empty());
  CHECK(problem(TestRequest(CallKind::kInit).request).empty());

  ExchangeRequest bad = good.request;
  bad.push.versions = {1};
  CHECK(problem(bad) == "rank 3, step 7: PushInfo.versions has 1 versions for 2 shards");
  bad = good.request;
  bad.out.pop_back();
  CHECK(problem(bad) == "rank 3, step 7: gradients: 2 tensors for a model of 3");
  bad = good.request;
  bad.in[1] = bad.in[0];
  CHECK(problem(bad) == "rank 3, step 7: weights: 40000 elements for tensor b [17]");
  bad = TestRequest(CallKind::kInit).request;
  bad.out.clear();
  CHECK(problem(bad) == "rank 3: initial values: 0 tensors for a model of 3");
}

TEST_CASE("Whoever waits takes the replies of the only link, and is not woken by what it does itself") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  int taken = 0;
  test.link().take_replies = [&](const std::function<bool()>& over, TimePoint /*deadline*/) {
    ++taken;
    CHECK_FALSE(over());
    test.Answer(0, 8, 1.5F);
    CHECK(over());
    return true;
  };
  test.link().wake_taker = [] { FAIL("it is this thread"); };
  const auto exchange = test.Begin(request.request);
  REQUIRE(exchange->WaitTensor(2).ok());
  CHECK(taken == 1);
  REQUIRE(exchange->Wait().ok());
}

TEST_CASE("Of several links nobody takes the replies: whoever waited for one would miss another's") {
  TestExchange test(2);
  TestRequest request(CallKind::kPushPull);
  for (FakeShardLink* link : test.links) {
    link->take_replies = [](const auto& /*over*/, TimePoint /*deadline*/) -> bool { throw std::logic_error("taken"); };
  }
  const auto exchange = test.Begin(request.request);
  CHECK_FALSE(exchange->WaitFor(absl::ZeroDuration()).has_value());
}

TEST_CASE(
    "One thread takes an exchange's replies, and is woken when another ends the exchange, and all who wait are told") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  std::atomic<int> takers = 0;
  std::atomic<int> wakes = 0;
  test.link().take_replies = [&](const std::function<bool()>& over, TimePoint /*deadline*/) {
    ++takers;
    takers.notify_all();
    for (int seen = wakes; !over(); seen = wakes) wakes.wait(seen);
    return true;
  };
  test.link().wake_taker = [&] {
    ++wakes;
    wakes.notify_all();
  };
  const auto exchange = test.Begin(request.request);
  std::vector<std::thread> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.emplace_back([&] { CHECK(absl::IsAborted(exchange->Wait().status())); });
    takers.wait(0);
  }
  exchange->Abort(absl::AbortedError("over"));
  test.call().End(absl::CancelledError(""));
  for (std::thread& each : waiting) each.join();
  CHECK(takers == 1);
}

}  // namespace
}  // namespace ps
