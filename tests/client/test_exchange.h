// An exchange of a small model with one shard or several, all of them the test's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/client/fake_shard_link.h"
#include "tests/client/fake_timer.h"
#include "worker/client/exchange.h"

namespace ps {

// Tensor 0 has slices 0 and 1, tensor 1 slice 2, tensor 2 slice 3. With two shards, the first has slice 0.
inline const Layout kTestLayout = {{"a", {40, 1000}}, {"b", {17}}, {"c", {1}}};
constexpr std::chrono::seconds kTestConnectTimeout(30);
constexpr std::chrono::seconds kTestNoticeEvery(10);
// gRPC ends a call so if the server is not there.
inline const absl::Status kUnavailable = absl::UnavailableError("Connection refused");

// A request on memory of its own.
struct TestRequest {
  explicit TestRequest(CallKind kind, uint64_t step = 7) {
    for (const TensorSpec& tensor : kTestLayout) {
      gradients.emplace_back(static_cast<size_t>(tensor.elements()), 0.5F);
      weights.emplace_back(static_cast<size_t>(tensor.elements()), 0.0F);
    }
    request.kind = kind;
    if (request.pushes()) request.push = {.step = step, .version = step, .versions = {}, .samples = 4};
    if (SendsSlices(kind)) request.out = {gradients.begin(), gradients.end()};
    if (ReceivesSlices(kind)) request.in = {weights.begin(), weights.end()};
  }

  std::vector<std::vector<float>> gradients;
  std::vector<std::vector<float>> weights;
  ExchangeRequest request;
};

class TestExchange {
 public:
  explicit TestExchange(uint32_t shards = 1, bool exact_versions = true) {
    context->plan = SlicePlan(kTestLayout, shards);
    for (uint32_t shard = 0; shard < shards; ++shard) {
      links.push_back(new FakeShardLink(context->plan, timer, "host-" + std::to_string(shard) + ":5000"));
      context->links.emplace_back(links.back());
    }
    context->rank = 3;
    context->incarnation = 11;
    context->exact_versions = exact_versions;
    context->patience.longest = kTestConnectTimeout;
    context->notice_every = kTestNoticeEvery;
    context->on_notice = [this](const std::string& text) { notices.push_back(text); };
  }

  // Ends what is still open.
  ~TestExchange() {
    if (exchange != nullptr) exchange->Abort(absl::CancelledError("the test has ended"));
    for (FakeShardLink* each : links) {
      if (each->calling()) each->call().End(absl::CancelledError(""));
    }
  }

  // Begins it; its result goes to `result` when there is one.
  std::shared_ptr<RetryingExchange> Begin(const ExchangeRequest& request) {
    exchange = std::make_shared<RetryingExchange>(
        context, timer, request, [this](absl::StatusOr<ExchangeResult> ended) { result = std::move(ended); });
    exchange->Begin();
    return exchange;
  }
  // Whether it has ended, and if so how.
  bool ended() {
    timer.RunDue();
    return result.has_value();
  }
  absl::Status status() { return ended() ? result->status() : absl::UnknownError("it has not ended"); }

  FakeShardLink& link(uint32_t shard = 0) { return *links[shard]; }
  FakeShardCall& call(uint32_t shard = 0) { return links[shard]->call(); }
  // The shard answers the call under way with all of its slices, each of this value.
  void Answer(uint32_t shard, uint64_t version, float value, PushAnswer answer = PushAnswer::kApplied) {
    FakeShardCall& open = call(shard);
    if (SendsSlices(open.request.kind)) open.reply.answer = answer;
    open.reply.version = version;
    if (ReceivesSlices(open.request.kind)) {
      for (const uint32_t slice : context->plan.shard_slices(shard)) (void)open.Receive(slice, value);
    }
    open.End(absl::OkStatus());
  }

  FakeTimer timer;
  const std::shared_ptr<ExchangeContext> context = std::make_shared<ExchangeContext>();
  std::vector<FakeShardLink*> links;
  std::vector<std::string> notices;
  std::shared_ptr<RetryingExchange> exchange;
  std::optional<absl::StatusOr<ExchangeResult>> result;
};

inline std::string Text(const absl::Status& status) {
  return std::string(status.message().data(), status.message().size());
}

}  // namespace ps
