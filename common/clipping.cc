#include "common/clipping.h"

#include <algorithm>
#include <cmath>

namespace ps {
namespace {

// The constant is that of torch.nn.utils.clip_grad_norm_.
constexpr double kClipEpsilon = 1e-6;

struct SquaresKernel {
  PS_KERNEL void Run(size_t elements, const float* values, double* lanes) {
    double sums[SquareSum::kLanes];
    for (size_t lane = 0; lane < SquareSum::kLanes; ++lane) sums[lane] = lanes[lane];
    size_t i = 0;
    for (; i + SquareSum::kLanes <= elements; i += SquareSum::kLanes) {
#pragma omp simd
      for (size_t lane = 0; lane < SquareSum::kLanes; ++lane) {
        const double value = values[i + lane];
        sums[lane] = sums[lane] + value * value;
      }
    }
    for (size_t lane = 0; i + lane < elements; ++lane) {
      const double value = values[i + lane];
      sums[lane] = sums[lane] + value * value;
    }
    for (size_t lane = 0; lane < SquareSum::kLanes; ++lane) lanes[lane] = sums[lane];
  }
};

struct ClipValuesKernel {
  PS_KERNEL void Run(size_t elements, float* values, float limit) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float value = values[i];
      const float below = value > limit ? limit : value;
      values[i] = below < -limit ? -limit : below;
    }
  }
};

struct FactorKernel {
  PS_KERNEL void Run(size_t elements, float* values, float factor) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) values[i] = factor * values[i];
  }
};

double Factor(float max, double squares) { return std::min(1.0, max / (std::sqrt(squares) + kClipEpsilon)); }

}  // namespace

void SquareSum::Add(const float* values, size_t elements, Isa isa) {
  RunKernel<SquaresKernel>(isa, elements, values, &lanes_[0]);
}

double SquareSum::total() const {
  double total = 0;
  for (const double lane : lanes_) total += lane;
  return total;
}

std::vector<float> ClipFactors(const ClipOptions& options, std::span<const double> squares) {
  std::vector<double> factors(squares.size(), 1.0);
  if (options.tensor_norm.has_value()) {
    for (size_t tensor = 0; tensor < squares.size(); ++tensor) {
      factors[tensor] = Factor(*options.tensor_norm, squares[tensor]);
    }
  }
  double of_all = 1;
  if (options.norm.has_value()) {
    double total = 0;
    for (size_t tensor = 0; tensor < squares.size(); ++tensor) {
      total += factors[tensor] * factors[tensor] * squares[tensor];
    }
    of_all = Factor(*options.norm, total);
  }
  std::vector<float> rounded;
  rounded.reserve(factors.size());
  for (const double factor : factors) rounded.push_back(static_cast<float>(factor * of_all));
  return rounded;
}

void ClipValues(float* values, size_t elements, float limit, Isa isa) {
  RunKernel<ClipValuesKernel>(isa, elements, values, limit);
}

void Scale(float* values, size_t elements, float factor, Isa isa) {
  RunKernel<FactorKernel>(isa, elements, values, factor);
}

}  // namespace ps
