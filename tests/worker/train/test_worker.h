// A worker without a trainer, whose servers the test plays (fake_client.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/worker/train/fake_client.h"
#include "tests/worker/train/metrics_lines.h"
#include "worker/model/device.h"
#include "worker/train/evaluator.h"
#include "worker/train/steps/steps.h"

namespace ps {

inline constexpr float kRate = 0.1F;  // The learning rate, of workers.

inline const ModePolicy kAsync = {};

inline ModePolicy Local(LocalSteps::Exchange exchange, uint32_t steps, uint64_t average_every = 0, float alpha = 0) {
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

inline Dataset OneSample() {
  return *Dataset::Create({.features = 2, .classes = 2, .floats = {1.0F, 0.5F}, .labels = {1}});
}

inline const TensorValues kInitial = {{0.1F, -0.2F, 0.3F, 0.4F}, {0.0F, 0.5F}};

// A worker without a trainer.
struct TestWorker {
  // `memory`: the network's, on a backend that takes it.
  TestWorker(const ModePolicy& policy, bool synchronous, TestSource with, const Layout& with_factors = {},
             std::unique_ptr<Backend> on = *CreateCpuBackend(1), const NetworkMemory& memory = {})
      : backend(std::move(on)),
        network(*Network::Create(model, *backend, Evaluator::kBatch, memory)),
        source(std::move(with)),
        layout(with_factors.empty() ? network->layout() : with_factors) {
    REQUIRE(batches->KeepSamples().ok());
    client = std::make_unique<FakeClient>(policy, synchronous, kInitial);
    for (size_t tensor = 0; tensor < 2; ++tensor) x.push_back(network->parameters(tensor));
    absl::StatusOr<ExchangeResult> started = client->Start({}, x);
    exchanges = std::make_unique<Exchanges>(*client, *std::move(started), waiting);
    absl::StatusOr<std::unique_ptr<Steps>> made = MakeDelayed(0);
    REQUIRE(made.ok());
    steps = *std::move(made);
  }

  absl::StatusOr<std::unique_ptr<Steps>> MakeDelayed(uint32_t delayed_pushes) {
    return MakeSteps({.client = *client,
                      .exchanges = *exchanges,
                      .network = *network,
                      .feed = feed,
                      .stats = stats,
                      .layout = layout,
                      .delayed_pushes = delayed_pushes});
  }
  void UseDelayedPushes(uint32_t delayed_pushes) {
    absl::StatusOr<std::unique_ptr<Steps>> made = MakeDelayed(delayed_pushes);
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
  const std::unique_ptr<Backend> backend;
  const std::unique_ptr<Network> network;
  const Dataset dataset = OneSample();
  const std::unique_ptr<Batches> batches = *Batches::Create(dataset, *backend, 4);
  TestSource source;
  const Layout layout;
  BatchFeed feed = BatchFeed(source, *batches);
  MetricsLines metrics;
  StepStats stats = StepStats(metrics.writer(), 0, 100, 0, TimePoint());
  MutableTensors x;
  std::unique_ptr<FakeClient> client;
  Waiting waiting;
  std::unique_ptr<Exchanges> exchanges;
  std::unique_ptr<Steps> steps;
};

// a + scale · b
inline TensorValues Plus(TensorValues a, float scale, const TensorValues& b) {
  for (size_t tensor = 0; tensor < a.size(); ++tensor) {
    for (size_t i = 0; i < a[tensor].size(); ++i) a[tensor][i] += scale * b[tensor][i];
  }
  return a;
}

inline void CheckNear(const TensorValues& a, const TensorValues& b) {
  REQUIRE(a.size() == b.size());
  for (size_t tensor = 0; tensor < a.size(); ++tensor) {
    REQUIRE(a[tensor].size() == b[tensor].size());
    for (size_t i = 0; i < a[tensor].size(); ++i) CHECK(std::abs(a[tensor][i] - b[tensor][i]) < 1e-6F);
  }
}

// Steps of SGD from these weights.
inline TensorValues Stepped(TestWorker& worker, TensorValues weights, int steps) {
  for (int i = 0; i < steps; ++i) weights = Plus(weights, -kRate, worker.Gradient(weights));
  return weights;
}

// The samples of all pushes.
inline std::vector<uint32_t> PushedSamples(const FakeClient& client) {
  std::vector<uint32_t> samples;
  for (const Asked& each : client.asked) {
    if (each.push.has_value()) samples.push_back(each.push->samples);
  }
  return samples;
}

// From 1 to 0 in 64 samples.
inline constexpr Schedule kFallingRate = {.kind = Schedule::Kind::kLinear, .length = 64};

// One step of SGD with this part of the learning rate.
inline TensorValues SteppedWith(TestWorker& worker, const TensorValues& weights, float factor) {
  return Plus(weights, -kRate * factor, worker.Gradient(weights));
}

}  // namespace ps
