#include "worker/train/evaluator.h"

#include <cmath>
#include <limits>

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
  bool keeps_best = false;
  std::unique_ptr<EvaluationThread> thread = *EvaluationThread::Create(Context());

  EvaluationThread::Context Context() {
    return {.data = data,
            .model = model,
            .device = device,
            .rank = 0,
            .metrics = metrics.writer(),
            .keeps_best = keeps_best};
  }

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
  const absl::StatusOr<EvaluationThread::Kept> last = evaluated.thread->Last(evaluated.Weights(20), 100, 90);
  REQUIRE(last.ok());
  CHECK(last->test.accuracy == 1.0);
  CHECK(std::abs(last->test.loss - LossOf(20)) < 1e-6);
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
  CHECK(absl::IsInvalidArgument(EvaluationThread::Create(evaluated.Context()).status()));
}

TEST_CASE("Without a validation split there is no best to keep") {
  Evaluated evaluated;
  evaluated.data.validation = {};
  CHECK(EvaluationThread::Create(evaluated.Context()).ok());
  evaluated.keeps_best = true;
  CHECK(absl::IsInvalidArgument(EvaluationThread::Create(evaluated.Context()).status()));
}

TEST_CASE("The weights with the lowest validation loss are kept and tested, the last ones among them") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  struct Case {
    std::vector<float> margins;  // Those of the last are the last weights'.
    size_t best;
  };
  for (const Case& each : {Case{{1, 3, 2}, 1}, Case{{1, 2, 3}, 2}, Case{{kNan, 1, -1}, 1}, Case{{2, 2, kNan}, 0}}) {
    Evaluated evaluated;
    evaluated.keeps_best = true;
    evaluated.thread = *EvaluationThread::Create(evaluated.Context());
    for (size_t i = 0; i + 1 < each.margins.size(); ++i) {
      REQUIRE(evaluated.thread->Add(evaluated.Weights(each.margins[i]), i + 5, i).ok());
    }
    const size_t last = each.margins.size() - 1;
    const auto kept = evaluated.thread->Last(evaluated.Weights(each.margins[last]), last + 5, last);
    REQUIRE(kept.ok());
    const float margin = each.margins[each.best];
    CHECK(kept->mark.version == each.best);
    CHECK(kept->mark.step == each.best + 5);
    REQUIRE(kept->best != nullptr);
    CHECK(kept->best->weights == Values{{margin, 0, 0, margin}, {0, 0}});
    CHECK(std::abs(kept->best->validation.loss - LossOf(margin)) < 1e-6);
    CHECK(std::abs(kept->test.loss - LossOf(margin)) < 1e-6);
    evaluated.thread = nullptr;
    const auto lines = evaluated.metrics.Take();
    REQUIRE(lines.size() == 2 * each.margins.size());  // Each on the validation split, then on the test split.
    CHECK(lines.back()["split"] == "test");
    CHECK(lines.back()["version"] == each.best);
    CHECK(lines[lines.size() - 2]["split"] == "validation");
    CHECK(lines[lines.size() - 2]["version"] == last);
  }
}

TEST_CASE("Where no validation loss is finite the last weights are kept") {
  Evaluated evaluated;
  evaluated.keeps_best = true;
  evaluated.thread = *EvaluationThread::Create(evaluated.Context());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  REQUIRE(evaluated.thread->Add(evaluated.Weights(kNan), 1, 1).ok());
  const auto kept = evaluated.thread->Last(evaluated.Weights(kNan), 2, 2);
  REQUIRE(kept.ok());
  CHECK(kept->mark.version == 2);
  CHECK(kept->best == nullptr);
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
