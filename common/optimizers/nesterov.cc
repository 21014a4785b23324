#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct NesterovKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* velocity, float* new_velocity, float rate, float momentum, float decay) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i] + decay * weights[i];
      const float v = momentum * velocity[i] + g;
      new_velocity[i] = v;
      new_weights[i] = weights[i] - rate * (g + momentum * v);
    }
  }
};

class Nesterov final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    RunKernel<NesterovKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                              block.new_state[0], hyper.learning_rate, hyper.momentum, hyper.weight_decay);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeNesterov() { return std::make_unique<Nesterov>(); }

}  // namespace ps
