// What a worker makes of its batches, in every mode, with servers that the test plays (fake_client.h).
#include "worker/steps/steps.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "tests/catch.h"
#include "tests/worker/fake_client.h"
#include "tests/worker/metrics_lines.h"
#include "worker/model/cpu_backend.h"
#include "worker/steps/averaging.h"

namespace ps {
namespace {

constexpr float kRate = 0.1F;  // The learning rate, of workers.

const ModePolicy kAsync = {};
const ModePolicy kBackup = {.empty_contributions = true};

ModePolicy Local(LocalSteps::Exchange exchange, uint32_t steps, uint64_t average_every = 0, float alpha = 0) {
  const bool elastic = exchange == LocalSteps::Exchange::kElastic;
  return {.empty_contributions = !elastic,
          .exact_versions = !elastic,
          .local_steps = LocalSteps{.exchange = exchange,
                                    .steps = steps,
                                    .average_every_steps = average_every,
                                    .alpha = alpha,
                                    .optimizer = "sgd"}};
}

// Gives batches of these sizes, all of sample 0, and then says `end`.
class TestSource final : public BatchSource {
 public:
  explicit TestSource(std::vector<int> sizes, std::vector<int> not_yet_before = {})
      : sizes_(std::move(sizes)), not_yet_before_(std::move(not_yet_before)) {}

  absl::StatusOr<NextBatch> Take(bool wait) override {
    if (next_ == static_cast<int>(sizes_.size())) return NextBatch{.kind = NextBatch::Kind::kSpent};
    const bool waits = std::find(not_yet_before_.begin(), not_yet_before_.end(), next_) != not_yet_before_.end();
    if (waits && !wait) return NextBatch{.kind = NextBatch::Kind::kNotYet};
    if (waits) CHECK(finished == next_);
    NextBatch next = {.kind = NextBatch::Kind::kBatch};
    next.plan.epoch_step = next_;
    next.plan.indices.resize(static_cast<size_t>(sizes_[static_cast<size_t>(next_++)]));
    return next;
  }
  void Finished(int64_t batches) override { finished = batches; }
  std::optional<int64_t> SkipTo(int64_t step) override {
    int64_t samples = 0;
    for (; next_ < std::min<int64_t>(step, std::ssize(sizes_)); ++next_) samples += sizes_[static_cast<size_t>(next_)];
    return samples;
  }
  int64_t batch_size() const override { return 4; }
  int64_t batches_per_epoch() const override { return 100; }
  int64_t total_batches() const override { return static_cast<int64_t>(sizes_.size()); }
  double own_batches_per_epoch() const override { return 100; }

  int64_t finished = 0;

 private:
  const std::vector<int> sizes_;
  const std::vector<int> not_yet_before_;
  int next_ = 0;
};

Dataset OneSample() { return *Dataset::Create({.features = 2, .classes = 2, .floats = {1.0F, 0.5F}, .labels = {1}}); }

const TensorValues kInitial = {{0.1F, -0.2F, 0.3F, 0.4F}, {0.0F, 0.5F}};

// A worker without a trainer.
struct TestWorker {
  TestWorker(const ModePolicy& policy, bool synchronous, TestSource with, const Layout& with_factors = {})
      : source(std::move(with)), layout(with_factors.empty() ? network->layout() : with_factors) {
    REQUIRE(batches->KeepSamples().ok());
    client = std::make_unique<FakeClient>(policy, synchronous, kInitial);
    for (size_t tensor = 0; tensor < 2; ++tensor) x.push_back(network->parameters(tensor));
    absl::StatusOr<ExchangeResult> started = client->Start({}, x);
    exchanges = std::make_unique<Exchanges>(*client, *std::move(started));
    absl::StatusOr<std::unique_ptr<Steps>> made = MakeSteps({.client = *client,
                                                             .exchanges = *exchanges,
                                                             .network = *network,
                                                             .feed = feed,
                                                             .stats = stats,
                                                             .layout = layout});
    REQUIRE(made.ok());
    steps = *std::move(made);
  }

  // Trains on so many batches, as a trainer does.
  void Train(int count) {
    for (int i = 0; i < count; ++i) {
      const absl::StatusOr<std::optional<TrainingBatch>> batch = feed.Next();
      REQUIRE(batch.ok());
      REQUIRE(batch->has_value());
      REQUIRE(steps->Train(**batch).ok());
      if (*feed.Peek() != NextBatch::Kind::kBatch) REQUIRE(steps->Settle().ok());
    }
  }
  // The gradient at the weights.
  TensorValues Gradient(const TensorValues& weights) {
    const auto other = *Network::Create(model, *backend, 4);
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      std::copy(weights[tensor].begin(), weights[tensor].end(), other->parameters(tensor).begin());
    }
    const std::vector<int32_t> indices(4);
    const auto own = *Batches::Create(dataset, *backend, 4);
    REQUIRE(own->KeepSamples().ok());
    const absl::StatusOr<Batch> batch = own->Load(indices);
    REQUIRE(other->TrainStep(*batch, {}).ok());
    return ValuesOf({other->gradients(0), other->gradients(1)});
  }
  TensorValues weights() const { return ValuesOf({x.begin(), x.end()}); }
  const Asked& last() const { return client->asked.back(); }

  const ModelOptions model = {.widths = {2, 2}};
  const std::unique_ptr<Backend> backend = *CreateCpuBackend(1);
  const std::unique_ptr<Network> network = *Network::Create(model, *backend, Evaluator::kBatch);
  const Dataset dataset = OneSample();
  const std::unique_ptr<Batches> batches = *Batches::Create(dataset, *backend, 4);
  TestSource source;
  const Layout layout;
  BatchFeed feed = BatchFeed(source, *batches);
  MetricsLines metrics;
  StepStats stats = StepStats(metrics.writer(), 0, 100, 0, TimePoint());
  MutableTensors x;
  std::unique_ptr<FakeClient> client;
  std::unique_ptr<Exchanges> exchanges;
  std::unique_ptr<Steps> steps;
};

// a + scale · b
TensorValues Plus(TensorValues a, float scale, const TensorValues& b) {
  for (size_t tensor = 0; tensor < a.size(); ++tensor) {
    for (size_t i = 0; i < a[tensor].size(); ++i) a[tensor][i] += scale * b[tensor][i];
  }
  return a;
}

void CheckNear(const TensorValues& a, const TensorValues& b) {
  REQUIRE(a.size() == b.size());
  for (size_t tensor = 0; tensor < a.size(); ++tensor) {
    REQUIRE(a[tensor].size() == b[tensor].size());
    for (size_t i = 0; i < a[tensor].size(); ++i) CHECK(std::abs(a[tensor][i] - b[tensor][i]) < 1e-6F);
  }
}

// Steps of SGD from these weights.
TensorValues Stepped(TestWorker& worker, TensorValues weights, int steps) {
  for (int i = 0; i < steps; ++i) weights = Plus(weights, -kRate, worker.Gradient(weights));
  return weights;
}

// The samples of all pushes.
std::vector<uint32_t> PushedSamples(const FakeClient& client) {
  std::vector<uint32_t> samples;
  for (const Asked& each : client.asked) {
    if (each.push.has_value()) samples.push_back(each.push->samples);
  }
  return samples;
}

// ---- Gradients

TEST_CASE("each batch's gradient is pushed, and the next one is computed on what came back") {
  TestWorker worker(kAsync, false, TestSource({4, 4}));
  worker.Train(1);
  CHECK(worker.last().push->step == 0);
  CHECK(worker.last().push->contribution == PushContribution::kGradient);
  CheckNear(worker.last().out, worker.Gradient(kInitial));
  CHECK(worker.weights() == worker.client->weights);
  const TensorValues second = worker.Gradient(worker.weights());
  worker.Train(1);
  CHECK(worker.last().push->step == 1);
  CHECK(worker.last().push->version == 1);
  CheckNear(worker.last().out, second);
  CHECK(worker.source.finished == 2);
}

TEST_CASE("a batch without samples is pushed where the mode asks for it, and else passed") {
  TestWorker asked({.empty_contributions = true}, false, TestSource({4, 0, 4}));
  asked.Train(3);
  CHECK(PushedSamples(*asked.client) == std::vector<uint32_t>{4, 0, 4});
  TestWorker passed(kAsync, false, TestSource({4, 0, 4}));
  passed.Train(3);
  CHECK(PushedSamples(*passed.client) == std::vector<uint32_t>{4, 4});
  CHECK(passed.last().push->step == 1);
  CHECK(passed.source.finished == 3);
}

TEST_CASE("exact versions go on into the next forward pass, and the last exchange ends with the budget") {
  TestWorker worker({.empty_contributions = true, .exact_versions = true}, true, TestSource({4, 4}));
  worker.Train(1);
  CHECK(worker.client->asked.empty());  // Under way.
  worker.Train(1);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{4, 4});
  CHECK(worker.source.finished == 2);
}

TEST_CASE("a worker that the job went on without jumps to the step that is named, and so do its batches") {
  TestWorker worker(kBackup, true, TestSource({1, 2, 3, 4, 1, 2}));
  worker.client->scripted = {
      {.version = 4, .versions = {4}, .answers = {PushAnswer::kStale}, .next_step = 4},
  };
  worker.Train(2);
  REQUIRE(worker.client->asked.size() == 2);
  CHECK(worker.last().push->step == 4);
  CHECK(worker.last().push->version == 4);
  CHECK(worker.last().push->samples == 1);
  CHECK(worker.stats.totals().dropped_pushes == 1);
  CHECK(worker.stats.totals().dropped_samples == 1);
  CHECK(worker.stats.totals().samples == 2);
  const auto lines = worker.metrics.Take();
  CHECK(lines[0]["answer"] == "STALE");
  CHECK(!lines[1].contains("answer"));
}

TEST_CASE("where shards went on unequally far, the weights of one version are pulled from all") {
  TestWorker worker(kBackup, true, TestSource({4, 4, 4, 4, 4, 4}));
  worker.client->scripted = {
      {.version = 1, .versions = {1, 2}, .answers = {PushAnswer::kApplied, PushAnswer::kApplied}, .next_step = 2},
      {.version = 2, .versions = {2, 3}},
      {.version = 3, .versions = {3, 3}},
  };
  worker.Train(1);
  REQUIRE(worker.client->asked.size() == 3);
  CHECK(worker.client->asked[1].version == 2);
  CHECK(worker.client->asked[2].version == 3);
  CHECK(worker.client->asked[2].step == 3);
  CHECK(worker.exchanges->step() == 3);
  CHECK(worker.exchanges->versions() == std::vector<uint64_t>{3, 3});
}

TEST_CASE(
    "a push that some shards call stale is counted once and told by shard, and the worker goes on with the next") {
  TestWorker worker(kAsync, false, TestSource({4, 4}));
  worker.client->scripted = {
      {.version = 7, .versions = {7, 9}, .answers = {PushAnswer::kApplied, PushAnswer::kStale}, .next_step = 1},
  };
  worker.Train(2);
  CHECK(worker.last().push->step == 1);
  CHECK(worker.last().push->versions == std::vector<uint64_t>{7, 9});
  CHECK(worker.stats.totals().dropped_pushes == 1);
  CHECK(worker.metrics.Take()[0]["answer"].dump() == R"(["APPLIED","STALE"])");
}

// ---- Averaged weights

TEST_CASE("a round's difference of weights is pushed with its samples, and the last round is shorter") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 2), true, TestSource({4, 3, 2}));
  worker.Train(1);
  CHECK(worker.client->asked.empty());
  CHECK(!worker.steps->at_exchange());
  CheckNear(worker.weights(), Stepped(worker, kInitial, 1));
  CHECK(worker.source.finished == 0);
  worker.Train(1);
  CHECK(worker.steps->at_exchange());
  CHECK(worker.last().push->contribution == PushContribution::kWeightDifference);
  CheckNear(worker.last().out, Plus(Stepped(worker, kInitial, 2), -1, kInitial));
  CHECK(worker.weights() == worker.client->weights);
  CHECK(worker.source.finished == 2);
  worker.client->weights = kInitial;  // Of the next version: of all differences, not of this worker's alone.
  worker.Train(1);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{7, 2});
  CHECK(worker.last().push->step == 1);
  CHECK(worker.last().push->version == 1);
  CHECK(worker.source.finished == 3);
  const auto lines = worker.metrics.Take();
  REQUIRE(lines.size() == 3);
  CHECK(lines[1]["step"] == 0);
  CHECK(lines[1]["batch"] == 1);
  CHECK(lines[1]["samples"] == 3);
  CHECK(lines[2]["step"] == 1);
}

TEST_CASE("the hyperparameters that come with the weights hold for the steps on them") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 1), true, TestSource({4, 4}));
  worker.client->hyperparameters = {{"learning_rate", 4 * kRate}};
  worker.Train(1);
  CheckNear(worker.last().out, Plus(Stepped(worker, kInitial, 1), -1, kInitial));
  const TensorValues gradient = worker.Gradient(worker.weights());
  worker.Train(1);
  CheckNear(worker.last().out, Plus({{0, 0, 0, 0}, {0, 0}}, -4 * kRate, gradient));
}

TEST_CASE("steps of one's own clip their gradient to the norms that the policy says") {
  ModePolicy policy = Local(LocalSteps::Exchange::kAverageWeights, 1);
  policy.local_steps->clip_norm = 0.05F;
  TestWorker worker(policy, true, TestSource({4}));
  const TensorValues gradient = worker.Gradient(kInitial);
  double squares = 0;
  for (const std::vector<float>& tensor : gradient) {
    for (const float each : tensor) squares += static_cast<double>(each) * each;
  }
  REQUIRE(squares > 0.0025);
  const auto factor = static_cast<float>(0.05 / (std::sqrt(squares) + 1e-6));
  worker.Train(1);
  CheckNear(worker.last().out, Plus({{0, 0, 0, 0}, {0, 0}}, -kRate * factor, gradient));
}

TEST_CASE("each tensor steps with its own factors of the learning rate and the weight decay") {
  Layout layout = ModelLayout({.widths = {2, 2}});
  layout[0].weight_decay_factor = 0.5F;
  layout[1].learning_rate_factor = 3;
  layout[1].weight_decay_factor = 0;
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 1), true, TestSource({4, 4}), layout);
  worker.client->hyperparameters = {{"learning_rate", kRate}, {"weight_decay", 0.2F}};
  worker.Train(1);  // With those that came first, which had no decay.
  const TensorValues weights = worker.weights();
  const TensorValues gradient = worker.Gradient(weights);
  worker.Train(1);
  const TensorValues zero = {{0, 0, 0, 0}, {0, 0}};
  TensorValues expected = Plus(Plus(zero, -kRate, gradient), -kRate * 0.1F, weights);
  expected[1] = Plus(zero, -3 * kRate, gradient)[1];
  CheckNear(worker.last().out, expected);
}

// From 1 to 0 in 64 samples.
constexpr Schedule kFallingRate = {.kind = Schedule::Kind::kLinear, .length = 64};

// One step of SGD with this part of the learning rate.
TensorValues SteppedWith(TestWorker& worker, const TensorValues& weights, float factor) {
  return Plus(weights, -kRate * factor, worker.Gradient(weights));
}

TEST_CASE("in a round the schedule goes on from the position that came with the weights, as if all were as fast") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 2), true, TestSource({4, 4, 4, 4}));
  worker.client->schedule = kFallingRate;
  worker.client->position = 16;  // After the first round.
  worker.client->workers = 2;
  worker.Train(2);  // What came at the start had no schedule.
  CheckNear(worker.last().out, Plus(Stepped(worker, kInitial, 2), -1, kInitial));
  const TensorValues began = worker.weights();
  worker.Train(2);
  const TensorValues ended = SteppedWith(worker, SteppedWith(worker, began, 0.75F), 0.625F);
  CheckNear(worker.last().out, Plus(ended, -1, began));
  CHECK_FALSE(worker.last().push->passed.has_value());  // All samples of the round.
}

TEST_CASE("in easgd the worker's own round, which the servers do not know of at its pull, has passed as well") {
  TestWorker worker(Local(LocalSteps::Exchange::kElastic, 2, 0, 0.25F), false, TestSource({4, 4, 4, 4}));
  worker.client->schedule = kFallingRate;
  worker.client->position = 24;
  worker.client->workers = 2;
  worker.Train(2);
  const TensorValues began = worker.weights();
  worker.Train(1);  // At 24 + 8.
  CheckNear(worker.weights(), SteppedWith(worker, began, 0.5F));
}

TEST_CASE("with averaged gradients each push says what has passed since the one before") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageGradients, 2, 4), true, TestSource({4, 3, 2, 4, 1}));
  worker.Train(5);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{3, 13, 1});
  std::vector<uint64_t> passed;
  passed.reserve(3);
  for (const Asked& each : worker.client->asked) passed.push_back(each.push->passed.value_or(0));
  CHECK(passed == std::vector<uint64_t>{7, 6, 1});
}

TEST_CASE("a round without samples is an empty contribution, and takes what the others have made") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 2), true, TestSource({0, 0, 4}));
  worker.client->weights = {{9, 9, 9, 9}, {9, 9}};
  worker.Train(2);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{0});
  CHECK(worker.weights() == worker.client->weights);
}

TEST_CASE("a round ends where the next batch has to be waited for, so that nobody waits for its batches") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageWeights, 3), true, TestSource({4, 4, 4, 4}, {2}));
  worker.Train(4);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{8, 8});
}

// ---- Averaged gradients

TEST_CASE("an averaged gradient moves the worker's weights by the servers' change, and averaging replaces them") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageGradients, 2, 4), true, TestSource({4, 4, 4, 4, 4}));
  worker.Train(1);
  CHECK(worker.client->asked.empty());
  const TensorValues drifted = Stepped(worker, kInitial, 1);
  worker.Train(1);
  const TensorValues gradient = worker.Gradient(drifted);
  CHECK(worker.last().push->contribution == PushContribution::kGradient);
  CHECK(worker.last().push->samples == 4);
  CheckNear(worker.last().out, gradient);
  CheckNear(worker.client->weights, Plus(kInitial, -0.5F, gradient));
  const TensorValues together = Plus(drifted, -0.5F, gradient);
  CheckNear(worker.weights(), together);
  worker.Train(2);  // The second averages weights, although gradients are due as well.
  CHECK(worker.last().push->contribution == PushContribution::kWeightDifference);
  CHECK(worker.last().push->samples == 16);
  CheckNear(worker.last().out, Plus(Stepped(worker, together, 2), -1, Plus(kInitial, -0.5F, gradient)));
  CHECK(worker.weights() == worker.client->weights);
  worker.Train(1);  // The end averages, too.
  CHECK(worker.last().push->contribution == PushContribution::kWeightDifference);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{4, 16, 4});
  CHECK(worker.source.finished == 5);
}

TEST_CASE("gradients are averaged after every so many batches or never, and weights after batches or epochs") {
  using What = Averaging::What;
  const auto plan = [](uint32_t steps, uint64_t every, double epochs, double per_epoch) {
    const Averaging averaging({.steps = steps, .average_every_steps = every, .average_every_epochs = epochs},
                              per_epoch);
    std::string text;
    for (int64_t number = 1; number <= 12; ++number) {
      const What what = averaging.After(number);
      text += what == What::kWeights ? 'w' : what == What::kGradients ? 'g' : '.';
    }
    return text;
  };
  CHECK(plan(2, 5, 0, 100) == ".g.gwg.g.w.g");
  CHECK(plan(3, 6, 0, 100) == "..g..w..g..w");
  CHECK(plan(0, 4, 0, 100) == "...w...w...w");
  CHECK(plan(1, 100, 0, 100) == "gggggggggggg");
  CHECK(plan(0, 0, 0.5, 6) == "..w..w..w..w");
  CHECK(plan(0, 0, 0.5, 5) == "..w.w..w.w..");
  CHECK(plan(0, 0, 1.0 / 3, 3) == "wwwwwwwwwwww");
  CHECK(plan(4, 0, 0.1, 5) == "wwwwwwwwwwww");  // Due more than once after each.
}

// ---- Elastic

TEST_CASE("after a round the centre is pulled, and the worker and it are drawn to each other by the same difference") {
  constexpr float kAlpha = 0.25F;
  TestWorker worker(Local(LocalSteps::Exchange::kElastic, 2, 0, kAlpha), false, TestSource({4, 3, 4}));
  const TensorValues centre = {{1, 1, 1, 1}, {-1, -1}};
  worker.client->weights = centre;
  worker.client->version = 6;
  worker.Train(2);
  REQUIRE(worker.client->asked.size() == 1);  // The push is on its way.
  CHECK(worker.last().step == 0);
  const TensorValues own = Stepped(worker, kInitial, 2);
  const TensorValues difference = Plus(Plus({{0, 0, 0, 0}, {0, 0}}, kAlpha, own), -kAlpha, centre);
  const TensorValues drawn = Plus(own, -1, difference);
  CheckNear(worker.weights(), drawn);
  worker.Train(1);
  REQUIRE(worker.client->asked.size() == 4);
  CHECK(worker.client->asked[1].push->contribution == PushContribution::kWeightDifference);
  CHECK(worker.client->asked[1].push->version == 6);
  CHECK(worker.client->asked[1].push->samples == 7);
  CHECK(!worker.client->asked[1].pulls);
  CheckNear(worker.client->asked[1].out, difference);
  CHECK(worker.client->asked[2].step == 1);
  CHECK(worker.client->asked[3].push->samples == 4);
  CHECK(worker.source.finished == 3);
}

TEST_CASE("an elastic round without samples pushes nothing") {
  TestWorker worker(Local(LocalSteps::Exchange::kElastic, 1, 0, 0.5F), false, TestSource({4, 0, 4}));
  worker.Train(3);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{4, 4});
  CHECK(worker.last().push->step == 1);
  CHECK(worker.source.finished == 3);
  const auto lines = worker.metrics.Take();
  REQUIRE(lines.size() == 3);
  for (int batch = 0; batch < 3; ++batch) CHECK(lines[static_cast<size_t>(batch)]["batch"] == batch);
}

// ---- What all have in common

TEST_CASE("an evaluation is of the servers' weights, and leaves the worker its own") {
  for (const ModePolicy& policy :
       {Local(LocalSteps::Exchange::kAverageGradients, 2, 100), Local(LocalSteps::Exchange::kElastic, 2, 0, 0.25F)}) {
    TestWorker worker(policy, policy.exact_versions, TestSource({4, 4, 4}));
    MetricsLines lines;
    DataSplits data = {.train = worker.dataset, .validation = {}, .test = worker.dataset};
    const auto evaluator = *Evaluator::Create(data, *worker.backend, *worker.network, lines.writer());
    REQUIRE(evaluator->KeepSamples().ok());
    worker.Train(2);
    REQUIRE(worker.steps->at_exchange());
    REQUIRE(worker.steps->Settle().ok());
    const TensorValues own = worker.weights();
    CHECK(own != worker.client->weights);
    REQUIRE(worker.steps->Evaluate(*evaluator).ok());
    CHECK(worker.weights() == own);
    const auto other = *Network::Create(worker.model, *worker.backend, 4);
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      const std::vector<float>& servers = worker.client->weights[tensor];
      std::copy(servers.begin(), servers.end(), other->parameters(tensor).begin());
    }
    REQUIRE(other->LoadParameters().ok());
    const std::vector<int32_t> indices(1);
    const absl::StatusOr<LossSums> expected = other->Evaluate(*worker.batches->Load(indices));
    REQUIRE(expected.ok());
    const auto evals = lines.Take();
    REQUIRE(evals.size() == 1);
    CHECK(std::abs(evals[0]["loss"].get<double>() - expected->loss) < 1e-6);
    CHECK(evals[0]["step"] == 1);
    CHECK(evals[0]["version"] == 1);
  }
}

TEST_CASE("a worker that joins at a step begins with the first batch of its round") {
  CHECK(FirstBatch(kAsync, 7, 10, 100) == 7);
  CHECK(FirstBatch(kAsync, UINT64_MAX, 10, 100) == 100);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kAverageWeights, 8), 3, 10, 100) == 24);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kAverageWeights, 8), 20, 10, 100) == 100);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kElastic, 8), 3, 10, 100) == 24);
  const ModePolicy gradients = Local(LocalSteps::Exchange::kAverageGradients, 2, 5);
  CHECK(FirstBatch(gradients, 0, 10, 100) == 0);
  CHECK(FirstBatch(gradients, 2, 10, 100) == 4);
  CHECK(FirstBatch(gradients, 3, 10, 100) == 5);
  CHECK(FirstBatch(gradients, 1000, 10, 100) == 100);
}

TEST_CASE("an optimizer that the worker does not know is refused by its name") {
  ModePolicy policy = Local(LocalSteps::Exchange::kAverageWeights, 1);
  policy.local_steps->optimizer = "unheard_of";
  TestWorker worker(kAsync, false, TestSource({4}));
  FakeClient client(policy, true, kInitial);
  const auto made = MakeSteps({.client = client,
                               .exchanges = *worker.exchanges,
                               .network = *worker.network,
                               .feed = worker.feed,
                               .stats = worker.stats,
                               .layout = worker.layout});
  CHECK(made.status().ToString().find("unheard_of") != std::string::npos);
}

}  // namespace
}  // namespace ps
