#include "worker/train/batches.h"

#include <optional>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

using Kind = NextBatch::Kind;

Sampler MakeSampler() {
  absl::StatusOr<Sampler> sampler = Sampler::Create({.samples = 10, .batch_size = 4, .shuffle = false});
  REQUIRE(sampler.ok());
  return *std::move(sampler);
}

// The place in the job of the batch that comes next, if one does.
std::optional<int64_t> TakePlace(BatchSource& source) {
  const absl::StatusOr<NextBatch> next = source.Take(/*wait=*/true);
  REQUIRE(next.ok());
  if (next->kind != Kind::kBatch) return std::nullopt;
  return source.PlaceOf(next->plan);
}

TEST_CASE("a fixed share is the rank's batches from the first to the budget's end, and never has to be waited for") {
  const auto source = MakeFixedShare(MakeSampler(), 2, 5);
  CHECK(source->batch_size() == 4);
  CHECK(source->batches_per_epoch() == 3);
  CHECK(source->own_batches_per_epoch() == 3);
  CHECK(source->total_batches() == 5);
  const absl::StatusOr<NextBatch> first = source->Take(/*wait=*/false);
  REQUIRE(first.ok());
  REQUIRE(first->kind == Kind::kBatch);
  CHECK(first->plan.indices == std::vector<int32_t>{8, 9});
  CHECK(TakePlace(*source) == 3);
  source->Finished(2);
  CHECK(TakePlace(*source) == 4);
  for (const bool wait : {false, true}) {
    const absl::StatusOr<NextBatch> end = source->Take(wait);
    REQUIRE(end.ok());
    CHECK(end->kind == Kind::kSpent);
  }
}

TEST_CASE("a fixed share that is left behind goes on with the batch of the step that the job is at") {
  const auto source = MakeFixedShare(MakeSampler(), 0, 10);
  CHECK(TakePlace(*source) == 0);
  CHECK(TakePlace(*source) == 1);
  CHECK(source->SkipTo(7) == 2 + 4 + 4 + 2 + 4);  // Of batches 2 to 6.
  CHECK(TakePlace(*source) == 7);
  CHECK(source->SkipTo(10) == 2 + 4);
  CHECK(TakePlace(*source) == std::nullopt);
}

TEST_CASE("a budget is so many steps, or so many epochs to the nearest batch, and never nothing") {
  CHECK(BudgetOf(7, 3, 100) == 7);
  CHECK(BudgetOf(0, 3, 100) == 300);
  CHECK(BudgetOf(0, 0.126, 100) == 13);
  CHECK(BudgetOf(0, 0.001, 100) == 1);
}

}  // namespace
}  // namespace ps
