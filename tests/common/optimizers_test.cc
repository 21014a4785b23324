#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Every optimizer is made by its name, and another name is refused with the choices") {
  CHECK(OptimizerNames() ==
        std::vector<std::string>{"sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lamb"});
  for (const std::string& name : OptimizerNames()) CHECK(MakeOptimizer(name).ok());
  CHECK(Message(MakeOptimizer("magic").status()) ==
        "--optimizer=magic: expected sgd, momentum, nesterov, adagrad, rmsprop, adam, adamw or lamb");
}

TEST_CASE("State has an initial value for each of its tensors, which is zero but for adagrad's") {
  const std::map<std::string, int> tensors = {{"sgd", 0},     {"momentum", 1}, {"nesterov", 1}, {"adagrad", 1},
                                              {"rmsprop", 1}, {"adam", 2},     {"adamw", 2},    {"lamb", 2}};
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const auto optimizer = *MakeOptimizer(name);
    CHECK(optimizer->state_tensors() == tensors.at(name));
    for (int k = 0; k < optimizer->state_tensors(); ++k) CHECK(optimizer->InitialState(k, {}) == 0);
  }
  CHECK(MakeAdagrad()->InitialState(0, {.initial_accumulator_value = 0.25F}) == 0.25F);
}

// Its state does not begin at zero, and its step depends on the number of the update and on what the hyperparameters
// are then.
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

// One weight and its state.
struct OneWeight {
  explicit OneWeight(const Optimizer& with, const Hyperparameters& hyper) : optimizer(with) {
    for (int k = 0; k < optimizer.state_tensors(); ++k) state[k] = optimizer.InitialState(k, hyper);
  }
  void Step(float gradient, const UpdateContext& context) {
    OptimizerBlock block = {.elements = 1, .gradient = &gradient, .weights = &weight, .new_weights = &weight};
    for (size_t k = 0; k < kMaxStateTensors; ++k) block.state[k] = block.new_state[k] = &state[k];
    optimizer.Apply(block, context, BestIsa());
  }

  const Optimizer& optimizer;
  float weight = 1;
  float state[kMaxStateTensors] = {};
};

// The same in double, straight from the definitions.
class Definition {
 public:
  Definition(std::string name, const Hyperparameters& hyper) : name_(std::move(name)), h_(hyper) {
    if (name_ == "adagrad") s_ = h_.initial_accumulator_value;
  }

  double Step(double gradient) {
    ++t_;
    if (name_ == "lamb") return w_ -= h_.learning_rate * (Direction(gradient) + h_.weight_decay * w_);  // Ratio 1.
    const double g = name_ == "adamw" ? gradient : gradient + h_.weight_decay * w_;
    if (name_ == "adamw") w_ *= 1 - static_cast<double>(h_.learning_rate) * h_.weight_decay;
    return w_ -= h_.learning_rate * Direction(g);
  }

 private:
  double Direction(double g) {
    if (name_ == "sgd") return g;
    if (name_ == "momentum") return m_ = h_.momentum * m_ + g;
    if (name_ == "nesterov") {
      m_ = h_.momentum * m_ + g;
      return g + h_.momentum * m_;
    }
    if (name_ == "adagrad") {
      s_ += g * g;
      return g / (std::sqrt(s_) + h_.eps) / (1 + (t_ - 1) * h_.lr_decay);
    }
    if (name_ == "rmsprop") {
      s_ = h_.alpha * s_ + (1 - h_.alpha) * g * g;
      return g / (std::sqrt(s_) + h_.eps);
    }
    m_ = h_.beta1 * m_ + (1 - h_.beta1) * g;
    s_ = h_.beta2 * s_ + (1 - h_.beta2) * g * g;
    return m_ / (1 - std::pow(h_.beta1, t_)) / (std::sqrt(s_ / (1 - std::pow(h_.beta2, t_))) + h_.eps);
  }

  // In double.
  struct Values {
    explicit Values(const Hyperparameters& from)
        : learning_rate(from.learning_rate),
          momentum(from.momentum),
          weight_decay(from.weight_decay),
          beta1(from.beta1),
          beta2(from.beta2),
          alpha(from.alpha),
          eps(from.eps),
          initial_accumulator_value(from.initial_accumulator_value),
          lr_decay(from.lr_decay) {}
    double learning_rate, momentum, weight_decay, beta1, beta2, alpha, eps, initial_accumulator_value, lr_decay;
  };
  const std::string name_;
  const Values h_;
  double w_ = 1;
  double m_ = 0;
  double s_ = 0;
  double t_ = 0;
};

TEST_CASE("Two hundred updates of every optimizer end where its definition in double precision does") {
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    Hyperparameters hyper = DefaultHyperparameters(name);
    hyper.weight_decay = 0.03F;
    hyper.initial_accumulator_value = 0.5F;
    hyper.lr_decay = 0.01F;
    const auto optimizer = *MakeOptimizer(name);
    OneWeight weight(*optimizer, hyper);
    Definition definition(name, hyper);
    std::mt19937 random(11);
    double moved = 0;
    double expected = 1;
    for (uint64_t update = 1; update <= 200; ++update) {
      const auto gradient = static_cast<float>(static_cast<double>(random()) / 4e9 - 0.3);
      weight.Step(gradient, {.update = update, .hyperparameters = hyper});
      const double before = expected;
      expected = definition.Step(static_cast<double>(gradient));
      moved += std::abs(expected - before);
      REQUIRE(std::abs(static_cast<double>(weight.weight) - expected) < 1e-6 + 2e-5 * moved);
    }
    CHECK(moved > 0.05);
  }
}

TEST_CASE("The first update of adam and adamw moves a weight by the learning rate, however small its gradient is") {
  for (const std::string name : {"adam", "adamw"}) {
    for (const float gradient : {1e-3F, 1.0F, -300.0F}) {
      Hyperparameters hyper = DefaultHyperparameters(name);
      hyper.weight_decay = 0;
      const auto optimizer = *MakeOptimizer(name);
      OneWeight weight(*optimizer, hyper);
      weight.Step(gradient, {.update = 1, .hyperparameters = hyper});
      CHECK(std::abs(std::abs(weight.weight - 1) - hyper.learning_rate) < 2e-5F * hyper.learning_rate + 1e-7F);
      CHECK((weight.weight < 1) == (gradient > 0));
    }
  }
}

TEST_CASE("Updates past 2^32 are counted: nothing is left to correct, and adagrad's rate has decayed") {
  constexpr uint64_t kLate = (uint64_t{1} << 32U) + 1;  // Its low 32 bits say that it is the first.
  for (const std::string name : {"adam", "adamw"}) {
    const Hyperparameters hyper = {.learning_rate = 0.5F, .beta1 = 0.5F, .beta2 = 0.75F};
    const auto optimizer = *MakeOptimizer(name);
    OneWeight weight(*optimizer, hyper);
    weight.Step(2, {.update = kLate, .hyperparameters = hyper});
    CHECK(weight.state[0] == 1);
    CHECK(weight.state[1] == 1);
    CHECK(weight.weight == 0.5F);  // m / √v = 1; the first update's would be m̂ / √v̂ with m̂ = 2 and v̂ = 4.
    OneWeight first(*optimizer, hyper);
    first.Step(4, {.update = kLate, .hyperparameters = {.learning_rate = 0.5F, .beta1 = 0.5F, .beta2 = 0}});
    CHECK(first.weight == 0.75F);  // 2 / √16, not 4 / √16.
  }
  const Hyperparameters hyper = {.learning_rate = 1, .eps = 1e-10F, .lr_decay = std::ldexp(1.0F, -32)};
  const auto adagrad = MakeAdagrad();
  OneWeight weight(*adagrad, hyper);
  weight.Step(3, {.update = kLate, .hyperparameters = hyper});
  CHECK(weight.weight == 0.5F);
}

TEST_CASE("Weights that have never had a gradient stay where they are") {
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    Hyperparameters hyper = DefaultHyperparameters(name);
    hyper.weight_decay = 0;
    const auto optimizer = *MakeOptimizer(name);
    OneWeight weight(*optimizer, hyper);
    for (uint64_t update = 1; update <= 3; ++update) weight.Step(0, {.update = update, .hyperparameters = hyper});
    CHECK(weight.weight == 1);
  }
}

TEST_CASE("A tensor's factors multiply the learning rate and the weight decay, and nothing else") {
  const Hyperparameters hyper = {.learning_rate = 0.5F, .weight_decay = 0.25F, .eps = 1e-4F};
  const Hyperparameters own =
      ForTensor(hyper, {.name = "b", .shape = {3}, .learning_rate_factor = 2, .weight_decay_factor = 0});
  CHECK(own.learning_rate == 1);
  CHECK(own.weight_decay == 0);
  CHECK(own.momentum == hyper.momentum);
  CHECK(own.eps == hyper.eps);
  const Hyperparameters same = ForTensor(hyper, {.name = "w", .shape = {3}});
  CHECK(same.learning_rate == hyper.learning_rate);
  CHECK(same.weight_decay == hyper.weight_decay);
}

// Gradients, weights and state, among them zeros, and values that are tiny or huge.
struct Numbers {
  explicit Numbers(size_t count) {
    std::mt19937 random(7);
    for (std::vector<float>* values : {&gradient, &weights, &state[0], &state[1]}) {
      values->resize(count);
      for (float& value : *values) {
        value = static_cast<float>(static_cast<double>(random()) / 1e9 - 2.0);
        if (random() % 8 == 0) value *= std::ldexp(1.0F, static_cast<int>(random() % 120) - 80);
        if (random() % 16 == 0) value = 0;
      }
    }
    for (std::vector<float>* values : {&state[0], &state[1]}) {  // Sums of squares are not negative.
      for (float& value : *values) value = std::abs(value);
    }
  }

  // Applies the optimizer in blocks of this size; returns weights and state one after the other.
  std::vector<float> Applied(const Optimizer& optimizer, const UpdateContext& context, size_t block_elements,
                             Isa isa) const {
    std::vector<float> new_weights = weights;
    std::vector<float> new_state[kMaxStateTensors] = {state[0], state[1]};
    for (size_t begin = 0; begin < weights.size(); begin += block_elements) {
      OptimizerBlock block = {.elements = std::min(block_elements, weights.size() - begin),
                              .gradient = &gradient[begin],
                              .weights = &new_weights[begin],
                              .new_weights = &new_weights[begin]};
      for (size_t k = 0; k < kMaxStateTensors; ++k) block.state[k] = block.new_state[k] = &new_state[k][begin];
      optimizer.Apply(block, context, isa);
    }
    for (const std::vector<float>& each : new_state) new_weights.insert(new_weights.end(), each.begin(), each.end());
    return new_weights;
  }

  std::vector<float> gradient;
  std::vector<float> weights;
  std::vector<float> state[kMaxStateTensors];
};

// Hyperparameters with which all terms of any optimizer have an effect.
UpdateContext EverythingSet(const std::string& optimizer) {
  UpdateContext context = {.update = 3, .hyperparameters = DefaultHyperparameters(optimizer)};
  context.hyperparameters.weight_decay = 0.01F;
  context.hyperparameters.lr_decay = 0.1F;
  return context;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
}

TEST_CASE("An update gives the same bits however it is cut into blocks") {
  const Numbers numbers(1000);
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const auto optimizer = *MakeOptimizer(name);
    const std::vector<float> whole = numbers.Applied(*optimizer, EverythingSet(name), 1000, BestIsa());
    CHECK(SameBits(numbers.Applied(*optimizer, EverythingSet(name), 1, BestIsa()), whole));
    CHECK(SameBits(numbers.Applied(*optimizer, EverythingSet(name), 37, BestIsa()), whole));
  }
}

TEST_CASE("An update gives the same bits on every instruction set") {
  const Numbers numbers(10007);
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const auto optimizer = *MakeOptimizer(name);
    const std::vector<float> portable = numbers.Applied(*optimizer, EverythingSet(name), 4096, Isa::kPortable);
    for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
      if (isa <= BestIsa()) CHECK(SameBits(numbers.Applied(*optimizer, EverythingSet(name), 4096, isa), portable));
    }
  }
}

// A tensor that lamb trains, in plain loops in double: You et al., 2020, algorithm 2.
struct PlainLamb {
  std::vector<double> w, m, v;

  void Step(const std::vector<float>& gradient, const Hyperparameters& hyper, uint64_t update) {
    const double beta1 = hyper.beta1, beta2 = hyper.beta2;
    std::vector<double> u(w.size());
    double weights = 0, updates = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = beta1 * m[i] + (1 - beta1) * gradient[i];
      v[i] = beta2 * v[i] + (1 - beta2) * gradient[i] * gradient[i];
      const double corrected_m = m[i] / (1 - std::pow(beta1, static_cast<double>(update)));
      const double corrected_v = v[i] / (1 - std::pow(beta2, static_cast<double>(update)));
      u[i] = corrected_m / (std::sqrt(corrected_v) + hyper.eps) + hyper.weight_decay * w[i];
      weights += w[i] * w[i];
      updates += u[i] * u[i];
    }
    const double ratio = weights > 0 && updates > 0 ? std::sqrt(weights) / std::sqrt(updates) : 1;
    for (size_t i = 0; i < w.size(); ++i) w[i] -= hyper.learning_rate * ratio * u[i];
  }
};

std::vector<float> GradientOf(size_t count, std::mt19937& random) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<double>(random()) / 1e9 - 2.0);
  return values;
}

TEST_CASE("lamb follows the paper's algorithm in plain loops, on every instruction set with the same bits") {
  const size_t count = 3001;
  const auto lamb = MakeLamb();
  CHECK(lamb->uses_trust_ratio());
  const Hyperparameters hyper = {.learning_rate = 0.01F, .weight_decay = 0.02F, .eps = 1e-6F};
  std::vector<float> first_w;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    std::mt19937 random(9);
    std::vector<float> w = GradientOf(count, random), m(count), v(count);
    PlainLamb plain = {.w = {w.begin(), w.end()}, .m = std::vector<double>(count), .v = std::vector<double>(count)};
    for (uint64_t update = 1; update <= 50; ++update) {
      const std::vector<float> gradient = GradientOf(count, random);
      OptimizerBlock block = {
          .elements = count, .gradient = gradient.data(), .weights = w.data(), .new_weights = w.data()};
      block.state[0] = block.new_state[0] = m.data();
      block.state[1] = block.new_state[1] = v.data();
      UpdateContext context = {.update = update, .hyperparameters = hyper};
      context.trust_ratio = TrustRatio(lamb->Measure(block, context, isa));
      lamb->Apply(block, context, isa);
      plain.Step(gradient, hyper, update);
    }
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; ++i) {
      difference += (w[i] - plain.w[i]) * (w[i] - plain.w[i]);
      norm += plain.w[i] * plain.w[i];
    }
    CHECK(std::sqrt(difference / norm) < 1e-5);
    if (first_w.empty()) first_w = w;
    CHECK(w == first_w);
  }
}

TEST_CASE("A trust ratio is 1 where the weights or the update are all zero") {
  CHECK(TrustRatio({.weights = 0, .update = 4}) == 1);
  CHECK(TrustRatio({.weights = 4, .update = 0}) == 1);
  CHECK(TrustRatio({.weights = 9, .update = 4}) == 1.5F);
  CHECK(TrustRatio({.weights = 1e4, .update = 1e-76}) == std::numeric_limits<float>::max());
}

UpdateContext Outer(uint64_t update, float lr, float momentum) {
  // What gradients are applied with is not looked at.
  return {.update = update,
          .hyperparameters = {
              .learning_rate = 5, .momentum = 0.1F, .weight_decay = 3, .outer_lr = lr, .outer_momentum = momentum}};
}

TEST_CASE("An outer optimizer takes the step for minus the difference, with hyperparameters of its own") {
  const auto steps = [](const std::string& name, const std::vector<float>& differences, float lr, float momentum) {
    const std::unique_ptr<Optimizer> optimizer = MakeOuterOptimizer(name);
    OneWeight one(*optimizer, {});
    uint64_t update = 0;
    for (const float difference : differences) one.Step(difference, Outer(++update, lr, momentum));
    return one.weight;
  };
  CHECK(steps("sgd", {0.5F, -0.25F}, 1, 0) == 1.25F);
  CHECK(steps("sgd", {0.5F}, 0.5F, 0.9F) == 1.25F);
  // v = 0.5, w = 1 + 0.5·0.5; v = 0.5·0.5 + 1, w = 1.25 + 0.5·1.25
  CHECK(steps("momentum", {0.5F, 1}, 0.5F, 0.5F) == 1.875F);
  // w = 1 + 0.5·(0.5 + 0.5·0.5); v = 1.25, w = 1.375 + 0.5·(1 + 0.5·1.25)
  CHECK(steps("nesterov", {0.5F, 1}, 0.5F, 0.5F) == 2.1875F);
  for (const std::string& name : OuterOptimizerNames()) {
    INFO(name);
    const auto plain = *MakeOptimizer(name);
    OneWeight expected(*plain, {});
    Hyperparameters hyper = DefaultHyperparameters(name);
    hyper.learning_rate = 0.25F;
    hyper.momentum = 0.75F;
    uint64_t update = 0;
    for (const float gradient : {-0.5F, 0.125F, 2.0F}) {
      expected.Step(gradient, {.update = ++update, .hyperparameters = hyper});
    }
    CHECK(steps(name, {0.5F, -0.125F, -2}, 0.25F, 0.75F) == expected.weight);
  }
  CHECK(OuterOptimizerChoices() == "sgd, momentum, nesterov, adagrad, rmsprop or adam");
}

// Known answer: N = 3, ε = 1, β = 0.9, three g = 1.
TEST_CASE("Delayed Nesterov adds shares of differences, and its momentum with every N-th") {
  const std::unique_ptr<Optimizer> optimizer = MakeDelayedNesterov(3, /*momentum=*/true);
  OneWeight one(*optimizer, {});
  one.weight = 0;
  const double expected[] = {-1.0 / 3, -2.0 / 3, -1.9, -1.9 - 1.0 / 3};
  for (uint64_t update = 1; update <= 4; ++update) {
    one.Step(-1, Outer(update, 1, 0.9F));
    CHECK(std::abs(one.weight - expected[update - 1]) < 1e-6);
  }
  const std::unique_ptr<Optimizer> shares = MakeDelayedNesterov(4, /*momentum=*/false);
  OneWeight plain(*shares, {});
  plain.Step(1, Outer(4, 0.5F, 0.9F));
  CHECK(plain.weight == 1.125F);
  CHECK(shares->state_tensors() == 0);
}

TEST_CASE("Delayed Nesterov with a buffer of one is outer Nesterov, and with one of N a step for the mean of N") {
  const std::unique_ptr<Optimizer> nesterov = MakeOuterOptimizer("nesterov");
  const std::unique_ptr<Optimizer> one_by_one = MakeDelayedNesterov(1, /*momentum=*/true);
  const std::unique_ptr<Optimizer> delayed = MakeDelayedNesterov(4, /*momentum=*/true);
  OneWeight means(*nesterov, {});
  OneWeight same(*one_by_one, {});
  OneWeight shares(*delayed, {});
  std::minstd_rand random(7);
  std::uniform_real_distribution<float> values(-1, 1);
  for (uint64_t round = 0; round < 50; ++round) {
    float mean = 0;
    for (uint64_t worker = 0; worker < 4; ++worker) {
      const float difference = values(random);
      mean += difference / 4;
      shares.Step(difference, Outer(4 * round + worker + 1, 0.7F, 0.9F));
    }
    means.Step(mean, Outer(round + 1, 0.7F, 0.9F));
    same.Step(mean, Outer(round + 1, 0.7F, 0.9F));
    CHECK(same.weight == means.weight);
    CHECK(std::abs(shares.weight - means.weight) < 1e-5);
  }
}

}  // namespace
}  // namespace ps
