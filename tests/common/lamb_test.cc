#include <cmath>
#include <limits>
#include <random>

#include "common/optimizers/optimizer.h"
#include "tests/catch.h"

namespace ps {
namespace {

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

}  // namespace
}  // namespace ps
