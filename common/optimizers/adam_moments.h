// What the optimizers of Adam's family have in common: running means of the gradients and of their squares, and the
// correction of what is missing from them at first.
#pragma once

#include <cmath>

#include "common/optimizers/optimizer.h"

namespace ps {

// m ← keep_m·m + add_m·g and v ← keep_v·v + add_v·g², of which m·scale_m and √v·scale_root_v are free of the zeros that
// m and v began with.
struct AdamMoments {
  float keep_m = 0;
  float add_m = 0;
  float keep_v = 0;
  float add_v = 0;
  double scale_m = 1;
  float scale_root_v = 1;
};

// The factors of this update. They are computed in double, and once for a block, as pow is slow and 1 - beta2 ^ update
// is small.
inline AdamMoments MomentsOf(const UpdateContext& context) {
  const auto beta1 = static_cast<double>(context.hyperparameters.beta1);
  const auto beta2 = static_cast<double>(context.hyperparameters.beta2);
  const auto updates = static_cast<double>(context.update);
  return {.keep_m = context.hyperparameters.beta1,
          .add_m = static_cast<float>(1 - beta1),
          .keep_v = context.hyperparameters.beta2,
          .add_v = static_cast<float>(1 - beta2),
          .scale_m = 1 / (1 - std::pow(beta1, updates)),
          .scale_root_v = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, updates)))};
}

// The weight decay is added to the gradient by l2, and taken off the weights by `decay`.
struct AdamTerms {
  AdamMoments moments;
  float rate = 0;
  float l2 = 0;
  float decay = 0;
  float eps = 0;
};

struct AdamKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* first, float* new_first, const float* second, float* new_second, AdamTerms terms) {
    const AdamMoments& moments = terms.moments;
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float w = weights[i];
      const float g = gradient[i] + terms.l2 * w;
      const float m = moments.keep_m * first[i] + moments.add_m * g;
      const float v = moments.keep_v * second[i] + moments.add_v * (g * g);
      new_first[i] = m;
      new_second[i] = v;
      // Not (1 - decay)·w: where decay is 1e-6, float32 would round that by some per cent of it.
      new_weights[i] = w - (terms.decay * w + terms.rate * (m / (std::sqrt(v) * moments.scale_root_v + terms.eps)));
    }
  }
};

// One step of Adam or AdamW over a block.
inline void ApplyAdam(const OptimizerBlock& block, const UpdateContext& context, float l2, float decay, Isa isa) {
  const AdamMoments moments = MomentsOf(context);
  const auto rate = static_cast<float>(static_cast<double>(context.hyperparameters.learning_rate) * moments.scale_m);
  const AdamTerms terms = {
      .moments = moments, .rate = rate, .l2 = l2, .decay = decay, .eps = context.hyperparameters.eps};
  RunKernel<AdamKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                        block.new_state[0], block.state[1], block.new_state[1], terms);
}

}  // namespace ps
