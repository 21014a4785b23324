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

}  // namespace

std::unique_ptr<Optimizer> MakeAdagrad() { return std::make_unique<Adagrad>(); }

}  // namespace ps
