#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

struct AddKernel {
  PS_KERNEL void Run(size_t elements, const float* difference, const float* weights, float* new_weights) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_weights[i] = weights[i] + difference[i];
  }
};

struct OuterNesterovKernel {
  PS_KERNEL void Run(size_t elements, const float* difference, const float* weights, float* new_weights,
                     const float* velocity, float* new_velocity, float momentum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float v = momentum * velocity[i] + difference[i];
      new_velocity[i] = v;
      new_weights[i] = weights[i] + (difference[i] + momentum * v);
    }
  }
};

class OuterNesterov final : public Optimizer {
 public:
  explicit OuterNesterov(float momentum) : momentum_(momentum) {}
  int state_tensors() const override { return momentum_ > 0 ? 1 : 0; }
  void Apply(const OptimizerBlock& block, const UpdateContext& /*context*/, Isa isa) const override {
    if (momentum_ > 0) {
      RunKernel<OuterNesterovKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights,
                                     block.state[0], block.new_state[0], momentum_);
    } else {
      RunKernel<AddKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights);
    }
  }

 private:
  const float momentum_;
};

}  // namespace

std::unique_ptr<Optimizer> MakeOuterNesterov(float momentum) { return std::make_unique<OuterNesterov>(momentum); }

}  // namespace ps
