#include "worker/evaluation_thread.h"

#include <cmath>

#include "tests/catch.h"
#include "tests/worker/metrics_lines.h"

namespace ps {
namespace {

// Two features; the class is that of the larger one.
Dataset RightClasses(int32_t size) {
  DatasetContent content = {.features = 2, .classes = 2};
  for (int32_t i = 0; i < size; ++i) {
    const int32_t label = i % 2;
    content.floats.insert(content.floats.end(), {label == 0 ? 1.0F : 0.0F, label == 0 ? 0.0F : 1.0F});
    content.labels.push_back(label);
  }
  return *Dataset::Create(std::move(content));
}

struct Evaluated {
  DataSplits data = {
      .train = RightClasses(4), .validation = RightClasses(8), .test = RightClasses(Evaluator::kBatch + 10)};
  ModelOptions model = {.widths = {2, 2}};
  DeviceOptions device;
  MetricsLines metrics;
  std::unique_ptr<EvaluationThread> thread = *EvaluationThread::Create(
      {.data = data, .model = model, .device = device, .rank = 0, .metrics = metrics.writer()});

  // Weights that answer all rightly, with this margin.
  std::vector<float> weight = {1, 0, 0, 1};
  std::vector<float> bias = {0, 0};
  ConstTensors Weights(float margin) {
    weight = {margin, 0, 0, margin};
    return {weight, bias};
  }
};

double LossOf(float margin) { return std::log1p(std::exp(-static_cast<double>(margin))); }

TEST_CASE("Copies are evaluated in order as they were when they were added, however many come at once") {
  Evaluated evaluated;
  constexpr int kCopies = 3 * static_cast<int>(EvaluationThread::kMaxWaiting);
  for (int i = 0; i < kCopies; ++i) {
    const auto version = static_cast<uint64_t>(i);
    REQUIRE(evaluated.thread->Add(evaluated.Weights(static_cast<float>(i)), version + 5, version).ok());
  }
  const absl::StatusOr<Evaluation> last = evaluated.thread->Last(evaluated.Weights(20), 100, 90);
  REQUIRE(last.ok());
  CHECK(last->accuracy == 1.0);
  CHECK(std::abs(last->loss - LossOf(20)) < 1e-6);
  evaluated.thread = nullptr;
  const auto lines = evaluated.metrics.Take();
  REQUIRE(lines.size() == kCopies + 2);
  double before = 0;
  for (int i = 0; i < kCopies; ++i) {
    const auto& line = lines[static_cast<size_t>(i)];
    CHECK(line["version"] == i);
    CHECK(line["step"] == i + 5);
    CHECK(line["split"] == "test");
    CHECK(std::abs(line["loss"].get<double>() - LossOf(static_cast<float>(i))) < 1e-6);
    CHECK(line["copied_t"].get<double>() >= before);
    before = line["copied_t"].get<double>();
  }
  CHECK(lines[kCopies]["split"] == "validation");
  CHECK(lines[kCopies + 1]["split"] == "test");
}

TEST_CASE("What has been evaluated is written when Drain returns") {
  Evaluated evaluated;
  REQUIRE(evaluated.thread->SetUp().ok());
  REQUIRE(evaluated.thread->Add(evaluated.Weights(1), 1, 1).ok());
  REQUIRE(evaluated.thread->Add(evaluated.Weights(2), 2, 2).ok());
  REQUIRE(evaluated.thread->Drain().ok());
  evaluated.thread = nullptr;
  CHECK(evaluated.metrics.Take().size() == 2);
}

TEST_CASE("A test split without samples is refused") {
  Evaluated evaluated;
  evaluated.data.test = {};
  CHECK(absl::IsInvalidArgument(EvaluationThread::Create({.data = evaluated.data,
                                                          .model = evaluated.model,
                                                          .device = evaluated.device,
                                                          .rank = 0,
                                                          .metrics = evaluated.metrics.writer()})
                                    .status()));
}

TEST_CASE("A network that cannot be made is the error of what was added, and of what is added later") {
  Evaluated evaluated;
  evaluated.device.device = "abacus";
  (void)evaluated.thread->Add(evaluated.Weights(1), 1, 1);
  CHECK_FALSE(evaluated.thread->Drain().ok());
  CHECK_FALSE(evaluated.thread->Add(evaluated.Weights(1), 2, 2).ok());
  CHECK_FALSE(evaluated.thread->Last(evaluated.Weights(1), 3, 3).ok());
}

}  // namespace
}  // namespace ps
