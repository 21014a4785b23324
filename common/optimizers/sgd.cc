// Stochastic gradient descent: plain, and with momentum.
#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct SgdKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights, float rate,
                     float decay) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_weights[i] = weights[i] - rate * (gradient[i] + decay * weights[i]);
  }
};

class Sgd final : public Optimizer {
 public:
  int state_tensors() const override { return 0; }
  bool keeps_still(const Hyperparameters& hyperparameters) const override { return hyperparameters.weight_decay == 0; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    RunKernel<SgdKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, hyper.learning_rate,
                         hyper.weight_decay);
  }
};

// With `kNesterov` the step looks ahead: it is what the velocity would be after this gradient once more.
template <bool kNesterov>
struct MomentumKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* velocity, float* new_velocity, float rate, float momentum, float decay) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i] + decay * weights[i];
      const float v = momentum * velocity[i] + g;
      new_velocity[i] = v;
      new_weights[i] = weights[i] - rate * (kNesterov ? g + momentum * v : v);
    }
  }
};

template <bool kNesterov>
class Momentum final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    RunKernel<MomentumKernel<kNesterov>>(isa, block.elements, block.gradient, block.weights, block.new_weights,
                                         block.state[0], block.new_state[0], hyper.learning_rate, hyper.momentum,
                                         hyper.weight_decay);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeSgd() { return std::make_unique<Sgd>(); }
std::unique_ptr<Optimizer> MakeMomentum() { return std::make_unique<Momentum<false>>(); }
std::unique_ptr<Optimizer> MakeNesterov() { return std::make_unique<Momentum<true>>(); }

}  // namespace ps
