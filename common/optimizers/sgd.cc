#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct SgdKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights, float rate,
                     float decay) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      new_weights[i] = weights[i] - rate * (gradient[i] + decay * weights[i]);
    }
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

}  // namespace

std::unique_ptr<Optimizer> MakeSgd() { return std::make_unique<Sgd>(); }

}  // namespace ps
