// What all kinds of steps have in common.
#include "tests/catch.h"
#include "tests/worker/train/test_worker.h"

namespace ps {
namespace {

TEST_CASE("what is evaluated are the servers' weights, and the worker keeps its own") {
  for (const ModePolicy& policy :
       {Local(LocalSteps::Exchange::kAverageGradients, 2, 100), Local(LocalSteps::Exchange::kElastic, 2, 0, 0.25F)}) {
    TestWorker worker(policy, policy.exact_versions, TestSource({4, 4, 4}));
    worker.Train(2);
    REQUIRE(worker.steps->at_exchange());
    REQUIRE(worker.steps->Settle().ok());
    const TensorValues own = worker.weights();
    CHECK(own != worker.client->weights);
    const absl::StatusOr<ConstTensors> servers = worker.steps->ServersWeights();
    REQUIRE(servers.ok());
    CHECK(ValuesOf(*servers) == worker.client->weights);
    CHECK(worker.exchanges->version() == worker.client->version);
    CHECK(worker.weights() == own);
  }
}

TEST_CASE("a worker that joins at a step begins with the first batch of its round") {
  CHECK(FirstBatch(kAsync, 7, 10, 100) == 7);
  CHECK(FirstBatch(kAsync, UINT64_MAX, 10, 100) == 100);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kAverageWeights, 8), 3, 10, 100) == 24);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kAverageWeights, 8), 20, 10, 100) == 100);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kElastic, 8), 3, 10, 100) == 24);
  // Each third batch has no samples.
  const auto samples = [](int64_t batch) -> int64_t { return batch % 3 == 2 ? 0 : 4; };
  CHECK(FirstBatch(kAsync, 2, 3, 100, samples) == 2);
  CHECK(FirstBatch(kAsync, 3, 3, 100, samples) == 4);
  CHECK(FirstBatch(kAsync, 1000, 3, 100, samples) == 100);
  CHECK(FirstBatch({.empty_contributions = true}, 3, 3, 100, samples) == 3);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kElastic, 2), 3, 3, 100, samples) == 6);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kElastic, 1), 3, 3, 100, samples) == 4);
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

TEST_CASE("After a job was restored with another number of workers, shares go on where its samples were") {
  // 100 samples an epoch; 4 workers make 5 batches of it, where 2 made 10: at their step 13 they had used 130.
  const ShareOrigin origin = OriginOf({.step = 13, .samples = 130}, 100, 5);
  CHECK(origin.step == 13);
  CHECK(origin.batch == 6);  // The first whose samples were not all used.
  const ModePolicy synchronous = {.empty_contributions = true};
  CHECK(FirstBatch(synchronous, 13, 5, 50, {}, origin) == 6);
  CHECK(FirstBatch(synchronous, 20, 5, 50, {}, origin) == 13);
  CHECK(FirstBatch(synchronous, 500, 5, 50, {}, origin) == 50);
  CHECK(FirstBatch(Local(LocalSteps::Exchange::kAverageWeights, 8), 15, 5, 50, {}, origin) == 22);
  CHECK(OriginOf({}, 100, 5).batch == 0);
  CHECK(OriginOf({.step = 1, .samples = UINT64_MAX}, 1, 1000).batch > 0);  // From the wire it may be anything.
}

}  // namespace
}  // namespace ps
