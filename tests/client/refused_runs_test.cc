#include "worker/client/refused_runs.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

using Runs = std::vector<uint64_t>;

// An exchange that ends when the test says so.
class EndedByHand final : public Exchange {
 public:
  void End(absl::StatusOr<ExchangeResult> result) { result_ = std::move(result); }
  void Answer(std::vector<PushAnswer> answers) {
    ExchangeResult result;
    result.answers = std::move(answers);
    End(std::move(result));
  }

  void TensorReady(size_t /*tensor*/) override {}
  void TensorReady(size_t /*tensor*/, std::span<const float> /*gradient*/, std::function<void()> /*release*/) override {
  }
  void TensorAbsent(size_t /*tensor*/) override {}
  bool SetSamples(uint32_t /*samples*/) override { return false; }
  absl::Status WaitTensor(size_t /*tensor*/) override { return absl::OkStatus(); }
  absl::StatusOr<ExchangeResult> Wait() override { return *result_; }
  std::optional<absl::Status> WaitTensorFor(size_t /*tensor*/, absl::Duration /*time*/) override { return {}; }
  std::optional<absl::StatusOr<ExchangeResult>> WaitFor(absl::Duration /*time*/) override { return result_; }

 private:
  std::optional<absl::StatusOr<ExchangeResult>> result_;
};

std::shared_ptr<EndedByHand> Begin(RefusedRuns& refused, uint64_t runs, bool partial = false) {
  auto push = std::make_shared<EndedByHand>();
  refused.Begun(runs, partial, push);
  return push;
}

TEST_CASE("Runs of a push that every shard refused are told once they are finished, until the chief knows") {
  RefusedRuns refused;
  const auto first = Begin(refused, 1);
  const auto second = Begin(refused, 3);  // Its round had two.
  CHECK(refused.Among(3).empty());
  second->Answer({PushAnswer::kStale, PushAnswer::kStale});
  first->Answer({PushAnswer::kApplied, PushAnswer::kApplied});
  CHECK(refused.Among(2) == Runs{2});
  CHECK(refused.Among(3) == Runs{2, 3});
  refused.Told(2);
  CHECK(refused.Among(3) == Runs{3});
}

TEST_CASE("Runs that a shard has used, or whose push ended without an answer, are not refused") {
  RefusedRuns refused;
  Begin(refused, 1)->Answer({PushAnswer::kStale, PushAnswer::kApplied});
  Begin(refused, 2)->End(absl::AbortedError("the job failed"));
  Begin(refused, 3)->Answer({});
  CHECK(refused.Among(3).empty());
}

TEST_CASE("A push that was given up is none: the one that is begun in its place is looked at") {
  RefusedRuns refused;
  Begin(refused, 1)->End(absl::AbortedError("given up"));
  refused.Look();
  Begin(refused, 1)->Answer({PushAnswer::kStale});
  CHECK(refused.Among(1) == Runs{1});
}

TEST_CASE("What is pushed in parts counts, and so does what went into an earlier push") {
  RefusedRuns refused;
  Begin(refused, 1, /*partial=*/true)->Answer({PushAnswer::kStale});
  Begin(refused, 1)->Answer({PushAnswer::kStale});
  Begin(refused, 0)->Answer({PushAnswer::kStale});  // An empty contribution.
  CHECK(refused.Among(9).empty());
}

TEST_CASE("A push that has ended is let go of") {
  RefusedRuns refused;
  const std::weak_ptr<EndedByHand> push = Begin(refused, 1);
  REQUIRE(!push.expired());
  push.lock()->Answer({PushAnswer::kStale});
  refused.Look();
  CHECK(push.expired());
  CHECK(refused.Among(1) == Runs{1});
}

}  // namespace
}  // namespace ps
