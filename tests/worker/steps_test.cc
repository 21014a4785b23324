// What all kinds of steps have in common.
#include <cmath>

#include "tests/catch.h"
#include "tests/worker/test_worker.h"

namespace ps {
namespace {

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
