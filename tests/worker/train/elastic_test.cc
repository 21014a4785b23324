// Workers whose weights and the servers' draw each other.
#include "tests/catch.h"
#include "tests/worker/train/test_worker.h"

namespace ps {
namespace {

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

}  // namespace
}  // namespace ps
