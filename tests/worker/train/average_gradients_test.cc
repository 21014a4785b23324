// Workers that take steps by themselves, and average gradients in between.
#include <string>

#include "tests/catch.h"
#include "tests/worker/train/test_worker.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

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

TEST_CASE("with averaged gradients each push says what has passed since the one before") {
  TestWorker worker(Local(LocalSteps::Exchange::kAverageGradients, 2, 4), true, TestSource({4, 3, 2, 4, 1}));
  worker.Train(5);
  CHECK(PushedSamples(*worker.client) == std::vector<uint32_t>{3, 13, 1});
  std::vector<uint64_t> passed;
  passed.reserve(3);
  for (const Asked& each : worker.client->asked) passed.push_back(each.push->passed.value_or(0));
  CHECK(passed == std::vector<uint64_t>{7, 6, 1});
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

}  // namespace
}  // namespace ps
