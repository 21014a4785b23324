// A schedule of the learning rate: what it is multiplied by, as a function of the samples that have passed.
#pragma once

#include <cstdint>

namespace ps {

// The position is the number of samples that all workers of a job have passed since it began, those of pushes that were
// refused included. Lengths and places are in the same unit. The factor rises linearly from 0 to 1 until `warmup`; then
// it is, with PyTorch's names in brackets,
//
//   kConstant    1
//   kStep        gamma ^ (position / step, rounded down)                        (StepLR; counted from the beginning)
//   kCosine      end + (1 − end) · (1 + cos(π·x)) / 2                           (CosineAnnealingLR; eta_min = end · lr)
//   kLinear      1 + (end − 1) · x                                              (LinearLR; start_factor 1, end_factor)
//   kPolynomial  end + (1 − end) · (1 − x) ^ power                              (PolynomialLR, where end is 0)
//
// where x goes from 0 at the warm-up's end to 1 at `length`, and stays there.
struct Schedule {
  enum class Kind { kConstant = 0, kStep = 1, kCosine = 2, kLinear = 3, kPolynomial = 4 };

  Kind kind = Kind::kConstant;
  uint64_t warmup = 0;  // Position; before `length`, and not after `step`.
  uint64_t length = 0;  // Position; of kCosine, kLinear and kPolynomial above 0.
  uint64_t step = 0;    // Samples; of kStep above 0.
  double gamma = 0.1;
  double power = 1;
  double end = 0;

  bool operator==(const Schedule&) const = default;

  // The factor for what is computed or applied when so many samples have passed. Machines whose C library and CPU are
  // the same give the same bits.
  double Factor(uint64_t position) const;
  // The learning rate, times the factor, in double.
  float Scaled(float learning_rate, uint64_t position) const;
};

}  // namespace ps
