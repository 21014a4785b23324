#include "worker/train/batches.h"

#include <numeric>
#include <optional>
#include <vector>

#include "tests/catch.h"
#include "tests/worker/model/queued_backend.h"

namespace ps {
namespace {

constexpr int64_t kFeatures = 5;

Dataset Make(bool bytes) {
  DatasetContent content;
  content.features = kFeatures;
  content.classes = 100;
  for (int32_t i = 0; i < 100; ++i) {
    content.labels.push_back(99 - i);
    for (int64_t k = 0; k < kFeatures; ++k) {
      if (bytes) content.bytes.push_back(static_cast<uint8_t>(i + k));
      if (!bytes) content.floats.push_back(static_cast<float>(i) + 0.25F * static_cast<float>(k));
    }
  }
  return *Dataset::Create(std::move(content));
}

void CheckBatches(Backend& backend, bool bytes, bool resident) {
  const Dataset dataset = Make(bytes);
  const auto batches = *Batches::Create(dataset, backend, 30);
  REQUIRE(batches->KeepSamples().ok());
  CHECK(batches->resident() == resident);
  for (const int32_t first : {0, 7, 70}) {
    std::vector<int32_t> indices(first == 70 ? 13 : 30);  // The last is smaller.
    std::iota(indices.rbegin(), indices.rend(), first);
    std::vector<float> x(indices.size() * kFeatures);
    std::vector<int32_t> labels(indices.size());
    dataset.Gather(indices, x.data(), labels.data());
    const absl::StatusOr<Batch> batch = batches->Load(indices);
    REQUIRE(batch.ok());
    REQUIRE(batch->size == static_cast<int64_t>(indices.size()));
    std::vector<float> got_x(x.size());
    std::vector<int32_t> got_labels(labels.size());
    REQUIRE(backend.CopyToHost(batch->x, got_x.data(), static_cast<int64_t>(x.size() * sizeof(float))).ok());
    REQUIRE(backend.CopyToHost(batch->labels, got_labels.data(), static_cast<int64_t>(labels.size() * sizeof(int32_t)))
                .ok());
    REQUIRE(backend.Synchronize().ok());
    CHECK(got_x == x);
    CHECK(got_labels == labels);
  }
}

void CheckTargets(Backend& backend, bool resident) {
  DatasetContent content;
  content.features = 1;
  for (int32_t i = 0; i < 40; ++i) {
    content.floats.push_back(static_cast<float>(i));
    content.targets.push_back(0.5F * static_cast<float>(i) - 3);
  }
  const auto batches = *Batches::Create(*Dataset::Create(std::move(content)), backend, 3);
  REQUIRE(batches->KeepSamples().ok());
  CHECK(batches->resident() == resident);
  const absl::StatusOr<Batch> batch = batches->Load(std::vector<int32_t>{39, 0, 7});
  REQUIRE(batch.ok());
  CHECK(batch->labels == nullptr);
  std::vector<float> targets(3);
  REQUIRE(backend.CopyToHost(batch->targets, targets.data(), 3 * sizeof(float)).ok());
  REQUIRE(backend.Synchronize().ok());
  CHECK(targets == std::vector<float>{16.5F, -3, 0.5F});
}

TEST_CASE("Batches of a regression have its targets") {
  const auto cpu = *CreateCpuBackend(1);
  QueuedBackend roomy;
  QueuedBackend full(int64_t{1} << 30);  // The reserve.
  CheckTargets(*cpu, true);
  CheckTargets(roomy, true);
  CheckTargets(full, false);
}

TEST_CASE("Batches are the data set's samples, gathered by the device where they fit, else by the host") {
  const auto cpu = *CreateCpuBackend(1);
  QueuedBackend roomy;
  QueuedBackend full(int64_t{1} << 30);  // The reserve.
  for (const bool bytes : {false, true}) {
    CheckBatches(*cpu, bytes, true);
    CheckBatches(roomy, bytes, true);
    CheckBatches(full, bytes, false);
  }
}

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
  CHECK(source->SkipTo(7) == 2 + 4 + 4 + 2 + 4);  // The samples of batches 2 to 6.
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
