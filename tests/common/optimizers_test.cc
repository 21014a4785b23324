#include <random>

#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Every optimizer is made by its name, and another name is refused with the choices") {
  CHECK(OptimizerNames() == std::vector<std::string>{"sgd", "momentum"});
  for (const std::string& name : OptimizerNames()) CHECK(MakeOptimizer(name).ok());
  CHECK(Message(MakeOptimizer("magic").status()) == "--optimizer=magic: expected sgd or momentum");
}

TEST_CASE("State has an initial value for each of its tensors, and momentum's is zero") {
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const auto optimizer = *MakeOptimizer(name);
    CHECK(optimizer->state_tensors() <= kMaxStateTensors);
    for (int k = 0; k < optimizer->state_tensors(); ++k) CHECK(optimizer->InitialState(k, {}) == 0);
  }
  CHECK(MakeSgd()->state_tensors() == 0);
  CHECK(MakeMomentum()->state_tensors() == 1);
}

// Stands for the optimizers that are to come: its state does not begin at zero, and its step depends on the number of
// the update and on what the hyperparameters are then.
class Counting final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  float InitialState(int /*k*/, const Hyperparameters& hyperparameters) const override {
    return hyperparameters.momentum;
  }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa /*isa*/) const override {
    for (size_t i = 0; i < block.elements; ++i) {
      block.new_state[0][i] = block.state[0][i] + static_cast<float>(context.update >> 32U);
      block.new_weights[i] = block.weights[i] - context.hyperparameters.learning_rate * block.gradient[i];
    }
  }
};

TEST_CASE("An optimizer sees the update's number in 64 bits and the hyperparameters of this update") {
  const Counting optimizer;
  float state = optimizer.InitialState(0, {.momentum = 0.25F});
  float weight = 1;
  const float gradient = 2;
  OptimizerBlock block = {.elements = 1, .gradient = &gradient, .weights = &weight, .new_weights = &weight};
  block.state[0] = block.new_state[0] = &state;
  optimizer.Apply(block, {.update = (uint64_t{3} << 32U) + 1, .hyperparameters = {.learning_rate = 0.5F}}, BestIsa());
  CHECK(state == 3.25F);
  CHECK(weight == 0);
  optimizer.Apply(block, {.hyperparameters = {.learning_rate = 0.25F}}, BestIsa());
  CHECK(state == 3.25F);
  CHECK(weight == -0.5F);
}

TEST_CASE("An update gives the same bits however it is cut into blocks") {
  std::mt19937 random(7);
  const size_t count = 1000;
  std::vector<float> gradient(count);
  std::vector<float> weights(count);
  std::vector<float> state(count);
  for (std::vector<float>* values : {&gradient, &weights, &state}) {
    for (float& value : *values) value = static_cast<float>(static_cast<double>(random()) / 1e9 - 2.0);
  }
  const UpdateContext context = {.hyperparameters = {.learning_rate = 0.3F, .momentum = 0.7F, .weight_decay = 0.01F}};
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const auto optimizer = *MakeOptimizer(name);
    std::vector<std::vector<float>> results;
    for (const size_t step : {count, size_t{1}, size_t{37}}) {
      std::vector<float> new_weights = weights;
      std::vector<float> new_state = state;
      for (size_t begin = 0; begin < count; begin += step) {
        OptimizerBlock block = {.elements = std::min(step, count - begin),
                                .gradient = &gradient[begin],
                                .weights = &new_weights[begin],
                                .new_weights = &new_weights[begin]};
        block.state[0] = block.new_state[0] = &new_state[begin];
        optimizer->Apply(block, context, BestIsa());
      }
      new_weights.insert(new_weights.end(), new_state.begin(), new_state.end());
      results.push_back(std::move(new_weights));
    }
    CHECK(results[1] == results[0]);
    CHECK(results[2] == results[0]);
  }
}

}  // namespace
}  // namespace ps
