#include "server/buffer_steps.h"

#include <algorithm>

namespace ps {
namespace {

struct MoveTowardsKernel {
  PS_KERNEL void Run(size_t elements, const float* pushed, const float* values, float* new_values, float share) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_values[i] = values[i] + share * (pushed[i] - values[i]);
  }
};

class MoveTowards final : public Optimizer {
 public:
  explicit MoveTowards(float share) : share_(share) {}
  int state_tensors() const override { return 0; }
  void Apply(const OptimizerBlock& block, const UpdateContext& /*context*/, Isa isa) const override {
    if (share_ == 1) {
      std::copy(block.gradient, block.gradient + block.elements, block.new_weights);
    } else {
      RunKernel<MoveTowardsKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, share_);
    }
  }

 private:
  const float share_;
};

}  // namespace

std::unique_ptr<Optimizer> MakeMoveTowards(float share) { return std::make_unique<MoveTowards>(share); }

BufferSteps::BufferSteps(float mean_share)
    : assign_(MakeMoveTowards(1)), mean_(MakeMoveTowards(mean_share)), add_(MakeOuterNesterov(0)) {}

const Optimizer& BufferSteps::Of(TensorKind kind, v1::Contribution contribution) const {
  if (contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE) return *add_;
  return kind == TensorKind::kBufferMean ? *mean_ : *assign_;
}

}  // namespace ps
