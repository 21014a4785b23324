// Workers that take steps by themselves, and average weights after each round.
#include <cmath>

#include "tests/catch.h"
#include "tests/worker/train/test_worker.h"

namespace ps {
namespace {

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
  worker.client->weights = kInitial;  // The next version's: made of all differences, not of this worker's alone.
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

}  // namespace
}  // namespace ps
