// Pushes whose gradients are still being computed: what they may become, and what must not happen before the last one.
#include <cmath>
#include <limits>

#include "tests/client/test_exchange.h"

namespace ps {
namespace {

using Slices = std::vector<uint32_t>;

TestRequest DeferredPushPull() {
  TestRequest request(CallKind::kPushPull);
  request.request.deferred = true;
  request.request.empty_contributions = true;
  return request;
}

void MakeNotFinite(TestRequest& request, size_t tensor) {
  request.gradients[tensor].back() = std::numeric_limits<float>::infinity();
}

TEST_CASE("No shard has a whole push before the last gradient is ready") {
  TestExchange test(2);
  TestRequest request = DeferredPushPull();
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);  // All that shard 0 has, and the first of shard 1.
  CHECK(test.call(0).sent.empty());
  CHECK(test.call(1).sent == Slices{1});
  exchange->TensorReady(1);
  exchange->TensorReady(2);
  CHECK(test.call(0).sent == Slices{0});
  CHECK(test.call(1).sent == Slices{1, 2, 3});
  CHECK(test.call(0).last);
}

TEST_CASE("A call that is made again holds back what completes its shard, too") {
  TestExchange test(2);
  TestRequest request = DeferredPushPull();
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);
  test.call(0).End(kUnavailable);
  test.timer.Advance(std::chrono::seconds(1));
  REQUIRE(test.link(0).calls.size() == 2);
  CHECK(test.call(0).sent.empty());
  exchange->TensorReady(1);
  exchange->TensorReady(2);
  CHECK(test.call(0).sent == Slices{0});
}

TEST_CASE("Weights that come before the last gradient is ready are not written, and are asked for again") {
  for (const bool exact : {true, false}) {
    TestExchange test(1, exact);
    TestRequest request = DeferredPushPull();
    const auto exchange = test.Begin(request.request);
    exchange->TensorReady(0);
    test.Answer(0, 8, 2, PushAnswer::kDuplicate);  // It counted already, as an earlier owner of the rank pushed it.
    CHECK(request.weights[0][0] == 0);
    CHECK_FALSE(test.ended());
    CHECK(test.notices.empty());
    exchange->TensorReady(1);
    exchange->TensorReady(2);
    test.timer.Advance(std::chrono::seconds(1));
    test.Answer(0, 8, 2, PushAnswer::kDuplicate);
    CHECK(test.status().ok());
    CHECK(request.weights[0][0] == 2);
  }
}

TEST_CASE("A gradient may be named when it is ready, and is let go of when the exchange has ended") {
  TestExchange test;
  TestRequest request = DeferredPushPull();
  for (auto& each : request.request.out) each = {};
  const auto exchange = test.Begin(request.request);
  int released = 0;
  for (size_t tensor = 0; tensor < kTestLayout.size(); ++tensor) {
    exchange->TensorReady(tensor, request.gradients[tensor], [&] { ++released; });
  }
  CHECK(test.call().sent == Slices{0, 1, 2, 3});
  CHECK((*test.call().request.out)[1].data() == request.gradients[1].data());
  CHECK(released == 0);
  test.Answer(0, 8, 1);
  CHECK(test.status().ok());
  CHECK(released == 3);
  exchange->TensorReady(0, request.gradients[0], [&] { ++released; });
  CHECK(released == 4);
}

TEST_CASE("A tensor without a gradient is told as absent, by a call that is made again, too, and may be the last") {
  TestExchange test(2);
  TestRequest request = DeferredPushPull();
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(2);
  exchange->TensorReady(1);
  CHECK(test.call(1).sent == Slices{3, 2});
  exchange->TensorAbsent(0);
  CHECK(test.call(0).sent == Slices{0});
  CHECK(test.call(1).sent == Slices{3, 2, 1});
  CHECK(test.call(1).last);
  const SlicePlan& plan = test.context->plan;
  CHECK(test.call(1).request.absent(plan.slices()[1]));
  CHECK_FALSE(test.call(1).request.absent(plan.slices()[2]));
  test.call(1).End(kUnavailable);
  test.timer.Advance(std::chrono::seconds(1));
  CHECK(test.call(1).sent == Slices{3, 2, 1});
  CHECK(test.call(1).request.absent(plan.slices()[1]));
  test.Answer(0, 8, 1);
  test.Answer(1, 8, 1);
  CHECK(test.status().ok());
}

TEST_CASE("What cannot be absent ends the exchange: a tensor twice, none, a buffer, a difference, an initial value") {
  const auto error_of = [](const TestRequest& request, const std::vector<size_t>& absent) {
    TestExchange test;
    const auto exchange = test.Begin(request.request);
    for (const size_t tensor : absent) exchange->TensorAbsent(tensor);
    test.call().End(absl::CancelledError(""));
    CHECK(absl::IsInvalidArgument(test.status()));
    return Text(test.status());
  };
  CHECK(error_of(DeferredPushPull(), {1, 1}) ==
        "rank 3, step 7: TensorAbsent for tensor 1, which is ready already, or has no gradient that is pushed");
  CHECK(error_of(DeferredPushPull(), {3}).find("tensor 3") != std::string::npos);
  TestRequest difference = DeferredPushPull();
  difference.request.push.contribution = PushContribution::kWeightDifference;
  CHECK(error_of(difference, {0}).find("tensor 0") != std::string::npos);
  TestRequest initial(CallKind::kInit);
  initial.request.deferred = true;
  CHECK(error_of(initial, {0}).find("tensor 0") != std::string::npos);
}

TEST_CASE("A tensor that is ready without memory, or with too little, ends the exchange by its name") {
  for (const size_t elements : {0, 16}) {
    TestExchange test;
    TestRequest request = DeferredPushPull();
    request.request.out[1] = {};
    const auto exchange = test.Begin(request.request);
    exchange->TensorReady(1, std::span<const float>(request.gradients[1]).first(elements), nullptr);
    test.call().End(absl::CancelledError(""));
    CHECK(absl::IsInvalidArgument(test.status()));
    CHECK(Text(test.status()).find("tensor b [17]") != std::string::npos);
  }
}

TEST_CASE("A number of samples that changed before the last gradient is told to servers that were told another") {
  TestExchange test(2);
  TestRequest request = DeferredPushPull();
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);
  CHECK(exchange->SetSamples(9));
  exchange->TensorReady(1);
  CHECK(exchange->SetSamples(6));
  exchange->TensorReady(2);
  CHECK_FALSE(exchange->SetSamples(7));
  for (const uint32_t shard : {0U, 1U}) {
    CHECK(test.call(shard).request.samples == 4);
    CHECK(test.call(shard).cancelled);
    CHECK_FALSE(test.call(shard).last);
    test.call(shard).End(absl::CancelledError(""));
  }
  test.timer.RunDue();
  CHECK(test.call(0).request.samples == 6);
  CHECK(test.call(0).sent == Slices{0});
  CHECK(test.call(1).sent == Slices{1, 2, 3});
  CHECK(test.call(1).last);
  test.Answer(0, 8, 1);
  test.Answer(1, 8, 1);
  CHECK(test.status().ok());
  CHECK(test.notices.empty());
}

TEST_CASE("A push tried again keeps its edition, one that is told anew has a later one, the next push one above that") {
  TestExchange test;
  TestRequest request = DeferredPushPull();
  request.request.begun = 5;
  const auto exchange = test.Begin(request.request);
  const uint64_t first = test.call().request.edition;
  test.call().End(absl::UnavailableError("broken"));
  test.timer.Advance(std::chrono::seconds(1));
  CHECK(test.call().request.edition == first);
  CHECK(exchange->SetSamples(9));
  for (const size_t tensor : {0, 1, 2}) exchange->TensorReady(tensor);
  test.call().End(absl::CancelledError(""));
  test.timer.RunDue();
  const uint64_t anew = test.call().request.edition;
  CHECK(anew > first);

  TestExchange next;
  request.request.begun = 6;
  next.Begin(request.request);
  CHECK(next.call().request.edition > anew);
}

TEST_CASE("A gradient that its caller has found finite is not looked at again") {
  for (const bool known : {true, false}) {
    TestExchange test;
    TestRequest request = DeferredPushPull();
    MakeNotFinite(request, 0);  // So that it shows.
    const auto exchange = test.Begin(request.request);
    known ? exchange->TensorReadyFinite(0) : exchange->TensorReady(0);
    CHECK(test.call().cancelled == !known);
    if (!known) continue;
    exchange->TensorReady(1);
    exchange->TensorReady(2);
    CHECK(test.call().last);
  }
}

TEST_CASE("The number of samples that was told already costs nothing") {
  TestExchange test;
  TestRequest request = DeferredPushPull();
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);
  CHECK(exchange->SetSamples(4));
  exchange->TensorReady(1);
  exchange->TensorReady(2);
  CHECK_FALSE(test.call().cancelled);
  CHECK(test.call().last);
}

TEST_CASE("A step whose gradient is not finite may become an empty contribution, once all are ready") {
  TestExchange test(2);
  TestRequest request = DeferredPushPull();
  request.request.push.skip_not_finite = true;
  MakeNotFinite(request, 1);
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(1);
  exchange->TensorReady(0);
  CHECK_FALSE(test.call(1).cancelled);
  exchange->TensorReady(2);
  for (const uint32_t shard : {0U, 1U}) test.call(shard).End(absl::CancelledError(""));
  test.timer.RunDue();
  for (const uint32_t shard : {0U, 1U}) {
    CHECK(test.call(shard).request.kind == CallKind::kPushPull);
    CHECK(test.call(shard).request.samples == 0);
    CHECK(test.call(shard).sent.empty());
    CHECK(test.call(shard).last);
    test.Answer(shard, 8, 3);
  }
  REQUIRE(test.status().ok());
  CHECK((*test.result)->skipped == "b");
  CHECK((*test.result)->next_step == 8);
  CHECK(request.weights[2][0] == 3);
}

TEST_CASE("Where there are no empty contributions such a step is a pull, and its number is free again") {
  TestExchange test(1, /*exact_versions=*/false);
  TestRequest request = DeferredPushPull();
  request.request.empty_contributions = false;
  request.request.push.skip_not_finite = true;
  MakeNotFinite(request, 2);
  const auto exchange = test.Begin(request.request);
  for (const size_t tensor : {2, 1, 0}) exchange->TensorReady(tensor);
  test.call().End(absl::CancelledError(""));
  test.timer.RunDue();
  CHECK(test.call().request.kind == CallKind::kPull);
  test.Answer(0, 30, 5);
  REQUIRE(test.status().ok());
  CHECK((*test.result)->skipped == "c");
  CHECK((*test.result)->next_step == 7);
  CHECK((*test.result)->answers.empty());
  CHECK(request.weights[0][0] == 5);
}

TEST_CASE("A push alone that has become none ends at once") {
  TestExchange test;
  TestRequest request(CallKind::kPush);
  request.request.deferred = true;
  const auto exchange = test.Begin(request.request);
  exchange->TensorReady(0);
  exchange->TensorReady(1);
  CHECK(exchange->SetSamples(0));
  exchange->TensorReady(2);
  test.call().End(absl::CancelledError(""));
  REQUIRE(test.status().ok());
  CHECK((*test.result)->version == 7);
  CHECK((*test.result)->next_step == 7);
  CHECK((*test.result)->skipped.empty());
}

TEST_CASE("A wait for a time says whether it was long enough, and the exchange goes on") {
  TestExchange test;
  TestRequest request(CallKind::kPushPull);
  const auto exchange = test.Begin(request.request);
  CHECK_FALSE(exchange->WaitFor(absl::Milliseconds(1)).has_value());
  CHECK_FALSE(exchange->WaitTensorFor(2, absl::Milliseconds(1)).has_value());
  (void)test.call().Receive(3, 2);
  CHECK(exchange->WaitTensorFor(2, absl::ZeroDuration())->ok());
  exchange->Abort(absl::CancelledError("stopped"));
  test.call().End(absl::CancelledError(""));
  CHECK(absl::IsCancelled(exchange->WaitFor(absl::Milliseconds(1))->status()));
}

TEST_CASE("Constants are initialised and pulled, but neither pushed nor brought by a push_pull") {
  TestExchange test;
  Layout layout = kTestLayout;
  layout[1].kind = TensorKind::kConstant;
  layout[2].kind = TensorKind::kBufferMean;
  test.context->plan = SlicePlan(layout, 1);
  SECTION("a push_pull") {
    TestRequest request(CallKind::kPushPull);
    request.request.out[1] = {};
    request.request.in[1] = {};
    const auto exchange = test.Begin(request.request);
    CHECK(exchange->CheckRequest().ok());
    CHECK(test.call().sent == Slices{0, 1, 3});
    CHECK(test.call().last);
    CHECK(exchange->WaitTensorFor(1, absl::ZeroDuration())->ok());
    for (const uint32_t slice : {0U, 1U, 3U}) (void)test.call().Receive(slice, 2);
    test.call().reply.answer = PushAnswer::kApplied;
    test.call().End(absl::OkStatus());
    CHECK(test.status().ok());
  }
  SECTION("a pull, and initial values") {
    TestRequest pull(CallKind::kPull);
    test.Begin(pull.request);
    test.Answer(0, 3, 1);
    CHECK(test.status().ok());
    CHECK(pull.weights[1][0] == 1);
    TestExchange init;
    init.context->plan = SlicePlan(layout, 1);
    TestRequest values(CallKind::kInit);
    init.Begin(values.request);
    CHECK(init.call().sent == Slices{0, 1, 2, 3});
  }
}

TEST_CASE("With a sender thread whoever computes gradients does not look at them, and all are sent all the same") {
  TestExchange test;
  test.context->sender = std::make_unique<TaskThread>("sender", TaskThread::AtEnd::kDoesTasks);
  TestRequest request = DeferredPushPull();
  MakeNotFinite(request, 2);
  const auto exchange = test.Begin(request.request);
  for (const size_t tensor : {0, 1, 2}) exchange->TensorReady(tensor);
  test.context->sender = nullptr;  // Its work is done.
  CHECK(test.call().sent == Slices{0, 1, 2});
  CHECK(test.call().cancelled);
  test.call().End(absl::CancelledError(""));
  CHECK(absl::IsInvalidArgument(test.status()));
}

}  // namespace
}  // namespace ps
