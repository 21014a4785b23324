#include "worker/train/evaluator.h"

#include <cmath>
#include <limits>

#include "tests/catch.h"
#include "tests/worker/train/metrics_lines.h"
#include "worker/model/device.h"

namespace ps {
namespace {

// The batches after which an evaluation is due, of those from `first` to the end.
std::vector<int64_t> DueAfter(double every, int64_t batches_per_epoch, int64_t total, int64_t first = 0) {
  EvaluationRhythm rhythm(every, batches_per_epoch, total, first);
  std::vector<int64_t> due;
  for (int64_t done = first + 1; done <= total; ++done) {
    if (rhythm.Due(done)) due.push_back(done);
  }
  return due;
}

TEST_CASE("Evaluations are due every so many epochs, but not at the end") {
  CHECK(DueAfter(1, 10, 40) == std::vector<int64_t>{10, 20, 30});
  CHECK(DueAfter(0.5, 10, 20) == std::vector<int64_t>{5, 10, 15});
  CHECK(DueAfter(0.1, 10, 5) == std::vector<int64_t>{1, 2, 3, 4});
  CHECK(DueAfter(2, 10, 45) == std::vector<int64_t>{20, 40});
  CHECK(DueAfter(0, 10, 40).empty());
}

TEST_CASE("Evaluations that are due between two batches, or several at once, are made once after the batch") {
  CHECK(DueAfter(0.25, 10, 11) == std::vector<int64_t>{3, 5, 8, 10});
  CHECK(DueAfter(0.01, 2, 4) == std::vector<int64_t>{1, 2, 3});
}

TEST_CASE("A worker that begins in the middle evaluates where the others do") {
  CHECK(DueAfter(1, 10, 40, 10) == std::vector<int64_t>{20, 30});
  CHECK(DueAfter(1, 10, 40, 17) == std::vector<int64_t>{20, 30});
}

TEST_CASE("A third of an epoch is reached although it has no exact number") {
  CHECK(DueAfter(1.0 / 3, 3, 10) == std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9});
}

// Two features; the class is that of the larger one. Every fifth sample is labelled wrongly.
Dataset Classes(int32_t size) {
  DatasetContent content = {.features = 2, .classes = 2};
  for (int32_t i = 0; i < size; ++i) {
    const int32_t label = i % 2;
    content.floats.insert(content.floats.end(), {label == 0 ? 1.0F : 0.0F, label == 0 ? 0.0F : 1.0F});
    content.labels.push_back(i % 5 == 0 ? 1 - label : label);
  }
  return *Dataset::Create(std::move(content));
}

TEST_CASE("An evaluation is the mean over all samples of a split, in however many batches, and is written down") {
  MetricsLines metrics;
  const auto backend = *CreateCpuBackend(1);
  const ModelOptions model = {.widths = {2, 2}};
  const auto network = *Network::Create(model, *backend, Evaluator::kBatch);
  network->parameters(0)[0] = network->parameters(0)[3] = 1;  // The identity.
  DataSplits data = {.train = Classes(10), .validation = Classes(20), .test = Classes(2 * Evaluator::kBatch + 100)};
  const auto evaluator = *Evaluator::Create(data, *backend, *network, metrics.writer());
  REQUIRE(evaluator->KeepSamples().ok());

  const double right = std::log(1 + std::exp(-1.0));
  const double wrong = std::log(1 + std::exp(1.0));
  for (const bool test : {true, false}) {
    const absl::StatusOr<Evaluation> found = test ? evaluator->Test({7, 6, 1.5}) : evaluator->Validation({9, 8, 2.5});
    REQUIRE(found.ok());
    CHECK(found->accuracy == 0.8);
    CHECK(found->loss == Approx(0.8 * right + 0.2 * wrong).epsilon(1e-5));
  }
  const auto lines = metrics.Take();
  REQUIRE(lines.size() == 2);
  CHECK(lines[0]["event"] == "eval");
  CHECK(lines[0]["step"] == 7);
  CHECK(lines[0]["version"] == 6);
  CHECK(lines[0]["copied_t"] == 1.5);
  CHECK(lines[0]["split"] == "test");
  CHECK(lines[0]["accuracy"] == 0.8);
  CHECK(lines[1]["split"] == "validation");
  CHECK(lines[1]["step"] == 9);
  CHECK(lines[1]["version"] == 8);
}

TEST_CASE("A regression's loss is in the units of its targets, and it has no accuracy") {
  MetricsLines metrics;
  const auto backend = *CreateCpuBackend(1);
  const auto network = *Network::Create({.widths = {1, 1}, .loss = Loss::kMse}, *backend, Evaluator::kBatch);
  DatasetContent content = {.features = 1, .floats = {5, 6, 7}, .targets = {1, 2, 3}};
  DataSplits data = {.test = *Dataset::Create(std::move(content))};
  data.scaling.targets = {.offset = {100}, .scale = {10}};
  const auto evaluator = *Evaluator::Create(data, *backend, *network, metrics.writer());
  REQUIRE(evaluator->KeepSamples().ok());
  const absl::StatusOr<Evaluation> found = evaluator->Test({});
  REQUIRE(found.ok());
  CHECK_FALSE(found->accuracy.has_value());
  CHECK(found->loss == Approx(100 * (1 + 4 + 9) / 3.0));  // All outputs are 0.
  REQUIRE(evaluator->Validation({}).ok());
  const auto lines = metrics.Take();
  REQUIRE(lines.size() == 1);  // No validation split, no line.
  CHECK_FALSE(lines[0].contains("accuracy"));
}

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
