#include <cmath>

#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct RmspropKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* square, float* new_square, float rate, float keep, float add, float decay,
                     float eps) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i] + decay * weights[i];
      const float s = keep * square[i] + add * (g * g);
      new_square[i] = s;
      new_weights[i] = weights[i] - rate * (g / (std::sqrt(s) + eps));
    }
  }
};

class Rmsprop final : public Optimizer {
 public:
  int state_tensors() const override { return 1; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    const auto add = static_cast<float>(1 - static_cast<double>(hyper.alpha));
    RunKernel<RmspropKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                             block.new_state[0], hyper.learning_rate, hyper.alpha, add, hyper.weight_decay, hyper.eps);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeRmsprop() { return std::make_unique<Rmsprop>(); }

}  // namespace ps
