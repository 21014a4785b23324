#include <algorithm>

#include "common/clipping.h"
#include "common/optimizers/adam_moments.h"

namespace ps {
namespace {

// What does not depend on the element.
struct LambTerms {
  AdamMoments moments;
  float scale_m = 1;
  float decay = 0;
  float eps = 0;
};

LambTerms LambTermsOf(const UpdateContext& context) {
  const AdamMoments moments = MomentsOf(context);
  return {.moments = moments,
          .scale_m = static_cast<float>(moments.scale_m),
          .decay = context.hyperparameters.weight_decay,
          .eps = context.hyperparameters.eps};
}

// m̂ / (√v̂ + eps) + wd·w
[[gnu::always_inline]] inline float LambUpdate(float m, float v, float weight, const LambTerms& terms) {
  return (m * terms.scale_m) / (std::sqrt(v) * terms.moments.scale_root_v + terms.eps) + terms.decay * weight;
}

struct LambKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, float* new_weights,
                     const float* first, float* new_first, const float* second, float* new_second, LambTerms terms,
                     float rate) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i];
      const float m = terms.moments.keep_m * first[i] + terms.moments.add_m * g;
      const float v = terms.moments.keep_v * second[i] + terms.moments.add_v * (g * g);
      const float w = weights[i];
      new_first[i] = m;
      new_second[i] = v;
      new_weights[i] = w - rate * LambUpdate(m, v, w, terms);
    }
  }
};

struct LambMeasureKernel {
  PS_KERNEL void Run(size_t elements, const float* gradient, const float* weights, const float* first,
                     const float* second, LambTerms terms, float* update) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i];
      const float m = terms.moments.keep_m * first[i] + terms.moments.add_m * g;
      const float v = terms.moments.keep_v * second[i] + terms.moments.add_v * (g * g);
      update[i] = LambUpdate(m, v, weights[i], terms);
    }
  }
};

class Lamb final : public Optimizer {
 public:
  int state_tensors() const override { return 2; }
  bool uses_trust_ratio() const override { return true; }

  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    RunKernel<LambKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                          block.new_state[0], block.state[1], block.new_state[1], LambTermsOf(context),
                          context.hyperparameters.learning_rate * context.trust_ratio);
  }

  TrustSquares Measure(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    constexpr size_t kElements = 1024;
    static_assert(kElements % SquareSum::kLanes == 0);
    alignas(64) float update[kElements];
    const LambTerms terms = LambTermsOf(context);
    SquareSum weights, updates;
    for (size_t begin = 0; begin < block.elements; begin += kElements) {
      const size_t elements = std::min(kElements, block.elements - begin);
      RunKernel<LambMeasureKernel>(isa, elements, block.gradient + begin, block.weights + begin, block.state[0] + begin,
                                   block.state[1] + begin, terms, &update[0]);
      weights.Add(block.weights + begin, elements, isa);
      updates.Add(&update[0], elements, isa);
    }
    return {.weights = weights.total(), .update = updates.total()};
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeLamb() { return std::make_unique<Lamb>(); }

}  // namespace ps
