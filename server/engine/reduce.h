// The one pass over memory that makes a slice's next version: for each block that fits the cache, sum the gradients in
// rank order, then apply the optimizer.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/optimizers/optimizer.h"
#include "common/payload.h"
#include "ps/tensor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// A received gradient of one slice, and its weight in the sum.
struct GradientTerm {
  const Payload* gradient = nullptr;
  float coefficient = 1.0F;
};

// What one version is made of: g = Σ cᵣ·gᵣ in the order of `terms`, in float32. All gradients are of one type.
struct VersionInput {
  std::vector<GradientTerm> terms;  // There is at least one.
  UpdateContext context;
  uint32_t version = 0;  // Its place among the versions of one update, below 32.
  // With delay compensation, g + λ·g⊙g⊙(w − w_pulled) takes g's place; w_pulled has as many elements as the slice.
  float delay_compensation = 0;
  const float* pulled = nullptr;
  // After that g's elements are clipped to within ±clip_value, if it is set, and multiplied by clip_factor, which clips
  // g's norm.
  std::optional<float> clip_value;
  float clip_factor = 1;
};

// Where new weights are rounded to, if that is anywhere: as many elements of two bytes.
struct RoundedWeights {
  uint8_t* to = nullptr;
  WireType type = WireType::kFloat32;
};

// Applies these versions to the slice, one after the other, in one pass over it; the result has the same bits as a pass
// for each version. slice.gradient is not read. `past_caches`: new weights and state, which are not the old ones'
// memory, are more than the caches hold, so they are written to memory at once. Of gradients in changeable memory each
// value is read once.
struct Applied {
  bool finite = true;          // The new weights, also when rounded, and all gradients that are changeable are.
  uint32_t not_finite_of = 0;  // A bit for each version (by its place) that has a changeable gradient that is not.
};
Applied ReduceAndApply(std::span<const VersionInput> versions, const OptimizerBlock& slice, const Optimizer& optimizer,
                       Isa isa, bool past_caches = false, const RoundedWeights& rounded = {});

// The sum of squares of g, before clip_factor: a slice's part of the gradient's norm. Nothing of the slice is used but
// its number of elements and, with delay compensation, its weights as they are before the update.
double GradientSquares(const VersionInput& version, const OptimizerBlock& slice, Isa isa);

// Measures what the optimizer would do to the slice with this version, as Optimizer::Measure; g is as it is applied.
TrustSquares UpdateSquares(const VersionInput& version, const OptimizerBlock& slice, const Optimizer& optimizer,
                           Isa isa);

// The share of a push of `samples` in a step of `total` samples: float(n_r / double(n)).
float Coefficient(uint64_t samples, uint64_t total);

// True if every element of the payload is finite. The payload's size must be that of whole elements.
bool AllFinite(const Payload& payload, Isa isa);

// The place of the first of these slices that has a value which is not finite; nothing: all are finite. Slices with
// changeable payloads are passed over. Payloads must be of whole elements.
std::optional<size_t> FindNotFinite(const std::vector<ReceivedSlice>& slices, Isa isa);

// What becomes of buffers in an update: tensors that are pushed but have no gradient (TensorKind, in ps.proto). Each
// rule is an optimizer without state, and has no use for hyperparameters; what it takes for the gradient is what is
// pushed.
class BufferSteps {
 public:
  // How far a buffer of the mean moves towards what is pushed (Mode::buffer_share), and how much of a difference it
  // takes (Mode::difference_share).
  BufferSteps(float mean_share, float difference_share);

  // What steps a buffer of this kind, where pushes carry this contribution. The lowest rank's difference is added.
  const Optimizer& Of(TensorKind kind, v1::Contribution contribution) const;

 private:
  const std::unique_ptr<Optimizer> assign_;
  const std::unique_ptr<Optimizer> mean_;
  const std::unique_ptr<Optimizer> add_;
  const std::unique_ptr<Optimizer> add_share_;
};

}  // namespace ps
