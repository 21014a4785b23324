// The outer optimizers: what servers apply to their weights where workers take steps of their own.
#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

// All of these are odd functions of the gradient, so the step for −d is that for d with the sign of the rate turned.
class OuterOptimizer final : public Optimizer {
 public:
  OuterOptimizer(std::unique_ptr<Optimizer> optimizer, const Hyperparameters& defaults)
      : optimizer_(std::move(optimizer)), defaults_(defaults) {}

  int state_tensors() const override { return optimizer_->state_tensors(); }
  float InitialState(int k, const Hyperparameters& hyperparameters) const override {
    return optimizer_->InitialState(k, Outer(hyperparameters));
  }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    optimizer_->Apply(block, {.update = context.update, .hyperparameters = Outer(context.hyperparameters)}, isa);
  }

 private:
  Hyperparameters Outer(const Hyperparameters& hyperparameters) const {
    Hyperparameters outer = defaults_;
    outer.learning_rate = -hyperparameters.outer_lr;
    outer.momentum = hyperparameters.outer_momentum;
    outer.weight_decay = 0;
    return outer;
  }

  const std::unique_ptr<Optimizer> optimizer_;
  const Hyperparameters defaults_;
};

struct ShareKernel {
  PS_KERNEL void Run(size_t elements, const float* difference, const float* weights, float* new_weights, float rate,
                     float share) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_weights[i] = weights[i] + rate * (share * difference[i]);
  }
};

// An update between two steps of the momentum.
struct DelayKernel {
  PS_KERNEL void Run(size_t elements, const float* difference, const float* weights, float* new_weights,
                     const float* sum, float* new_sum, float rate, float share) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      new_sum[i] = sum[i] + difference[i];
      new_weights[i] = weights[i] + rate * (share * difference[i]);
    }
  }
};

// An update with a step of the momentum; the sum begins anew.
struct DelayedStepKernel {
  PS_KERNEL void Run(size_t elements, const float* difference, const float* weights, float* new_weights,
                     const float* velocity, float* new_velocity, const float* sum, float rate, float momentum,
                     float share) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float v = momentum * velocity[i] + share * (sum[i] + difference[i]);
      new_velocity[i] = v;
      new_weights[i] = weights[i] + rate * (share * difference[i] + momentum * v);
    }
  }
};

class DelayedNesterov final : public Optimizer {
 public:
  DelayedNesterov(uint32_t buffer, bool momentum)
      : buffer_(buffer), share_(1.0F / static_cast<float>(buffer)), momentum_(momentum) {}

  int state_tensors() const override { return momentum_ ? 2 : 0; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const float rate = context.hyperparameters.outer_lr;
    if (!momentum_) {
      return RunKernel<ShareKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, rate,
                                    share_);
    }
    const float* const velocity = block.state[0];
    float* const new_velocity = block.new_state[0];
    if (context.update % buffer_ == 0) {
      RunKernel<DelayedStepKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, velocity,
                                   new_velocity, block.state[1], rate, context.hyperparameters.outer_momentum, share_);
      std::fill_n(block.new_state[1], block.elements, 0.0F);
      return;
    }
    if (new_velocity != velocity) std::copy(velocity, velocity + block.elements, new_velocity);
    RunKernel<DelayKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[1],
                           block.new_state[1], rate, share_);
  }

 private:
  const uint32_t buffer_;
  const float share_;
  const bool momentum_;
};

}  // namespace

std::vector<std::string> OuterOptimizerNames() { return {"sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam"}; }

std::unique_ptr<Optimizer> MakeOuterOptimizer(const std::string& name) {
  absl::StatusOr<std::unique_ptr<Optimizer>> optimizer = MakeOptimizer(name);
  Check(optimizer.ok(), "the outer optimizer's name is valid");
  return std::make_unique<OuterOptimizer>(*std::move(optimizer), DefaultHyperparameters(name));
}

std::unique_ptr<Optimizer> MakeDelayedNesterov(uint32_t buffer, bool momentum) {
  return std::make_unique<DelayedNesterov>(buffer, momentum);
}

}  // namespace ps
