// Optimizers that divide by the root of the squared gradients: of their sum, and of their running mean.
#include <cmath>

#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct AdagradKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights, const float* sum,
                     float* new_sum, float rate, float decay, float eps) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i] + decay * weights[i];
      const float s = sum[i] + g * g;
      new_sum[i] = s;
      new_weights[i] = weights[i] - rate * (g / (std::sqrt(s) + eps));
    }
  }
};

class Adagrad final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  float InitialState(int /*k*/, const Hyperparameters& hyperparameters) const override {
    return hyperparameters.initial_accumulator_value;
  }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    const double before = static_cast<double>(context.update - 1);  // Updates.
    const double rate = static_cast<double>(hyper.learning_rate) / (1 + before * static_cast<double>(hyper.lr_decay));
    RunKernel<AdagradKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                             block.new_state[0], static_cast<float>(rate), hyper.weight_decay, hyper.eps);
  }
};

struct RmspropTerms {
  float rate = 0;
  float keep = 0;
  float add = 0;
  float decay = 0;
  float eps = 0;
};

struct RmspropKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* square, float* new_square, RmspropTerms terms) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i] + terms.decay * weights[i];
      const float s = terms.keep * square[i] + terms.add * (g * g);
      new_square[i] = s;
      new_weights[i] = weights[i] - terms.rate * (g / (std::sqrt(s) + terms.eps));
    }
  }
};

class Rmsprop final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    const RmspropTerms terms = {.rate = hyper.learning_rate,
                                .keep = hyper.alpha,
                                .add = static_cast<float>(1 - static_cast<double>(hyper.alpha)),
                                .decay = hyper.weight_decay,
                                .eps = hyper.eps};
    RunKernel<RmspropKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                             block.new_state[0], terms);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeAdagrad() { return std::make_unique<Adagrad>(); }
std::unique_ptr<Optimizer> MakeRmsprop() { return std::make_unique<Rmsprop>(); }

}  // namespace ps
