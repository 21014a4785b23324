// Adam's family: running means of the gradients and of their squares, and the correction of what is missing from them
// at first.
#include <algorithm>
#include <cmath>

#include "common/clipping.h"
#include "common/optimizers/optimizer.h"

namespace ps {
namespace {

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
AdamMoments MomentsOf(const UpdateContext& context) {
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

// AdamW is Adam whose weight decay is decoupled from the gradient.
class Adam final : public Optimizer {
 public:
  explicit Adam(bool decoupled) : decoupled_(decoupled) {}
  int state_tensors() const override { return 2; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    const AdamMoments moments = MomentsOf(context);
    const AdamTerms terms = {.moments = moments,
                             .rate = static_cast<float>(static_cast<double>(hyper.learning_rate) * moments.scale_m),
                             .l2 = decoupled_ ? 0 : hyper.weight_decay,
                             .decay = decoupled_ ? hyper.learning_rate * hyper.weight_decay : 0,
                             .eps = hyper.eps};
    RunKernel<AdamKernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, block.state[0],
                          block.new_state[0], block.state[1], block.new_state[1], terms);
  }

 private:
  const bool decoupled_;
};

// What does not depend on the element.
struct LambTerms {
  explicit LambTerms(const UpdateContext& context)
      : moments(MomentsOf(context)),
        scale_m(static_cast<float>(moments.scale_m)),
        decay(context.hyperparameters.weight_decay),
        eps(context.hyperparameters.eps) {}

  AdamMoments moments;
  float scale_m;
  float decay;
  float eps;
};

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
                          block.new_state[0], block.state[1], block.new_state[1], LambTerms(context),
                          context.hyperparameters.learning_rate * context.trust_ratio);
  }

  TrustSquares Measure(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    constexpr size_t kElements = 1024;
    static_assert(kElements % SquareSum::kLanes == 0);
    alignas(64) float update[kElements];
    const LambTerms terms(context);
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

std::unique_ptr<Optimizer> MakeAdam() { return std::make_unique<Adam>(/*decoupled=*/false); }
std::unique_ptr<Optimizer> MakeAdamW() { return std::make_unique<Adam>(/*decoupled=*/true); }
std::unique_ptr<Optimizer> MakeLamb() { return std::make_unique<Lamb>(); }

}  // namespace ps
