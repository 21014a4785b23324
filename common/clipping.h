// Clipping of gradients, and the sums of squares that norms are found from. Nothing here depends on how gradients are
// cut into blocks, nor on the instruction set.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "common/simd.h"

namespace ps {

// Unset: not. All that are set apply, in this order.
struct ClipOptions {
  std::optional<float> value;        // Each element to within ±value.
  std::optional<float> tensor_norm;  // Each tensor's L2 norm to at most this.
  std::optional<float> norm;         // The L2 norm of all tensors together to at most this.

  bool needs_norms() const { return tensor_norm.has_value() || norm.has_value(); }
};

// A sum of squares in double. Element i of all that is added goes to lane i mod kLanes, and the lanes are added in
// their order: so it depends on the floats and their order alone.
class SquareSum {
 public:
  static constexpr size_t kLanes = 16;

  // The next elements. Every call but the last brings a multiple of kLanes.
  void Add(const float* values, size_t elements, Isa isa);
  double total() const;

 private:
  double lanes_[kLanes] = {};
};

// What each tensor's gradient is multiplied by, from the sum of squares of each tensor's gradient (clipped by value),
// in the layout's order: min(1, max / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it, for the tensor's norm
// and then for that of all tensors, in double. Squares that are added over tensors are added in the layout's order.
std::vector<float> ClipFactors(const ClipOptions& options, std::span<const double> squares);

// Each element to within ±limit; what is not a number stays so.
void ClipValues(float* values, size_t elements, float limit, Isa isa);
// values ← factor · values
void Scale(float* values, size_t elements, float factor, Isa isa);

}  // namespace ps
