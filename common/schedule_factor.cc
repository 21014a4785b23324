#include <cmath>
#include <numbers>

#include "ps/schedule.h"

namespace ps {

double Schedule::Factor(uint64_t position) const {
  if (position < warmup) return static_cast<double>(position) / static_cast<double>(warmup);
  if (kind == Kind::kConstant) return 1;
  if (kind == Kind::kStep) {
    const uint64_t steps = position / step;
    return std::pow(gamma, static_cast<double>(steps));
  }
  if (position >= length) return end;
  const double x = static_cast<double>(position - warmup) / static_cast<double>(length - warmup);
  switch (kind) {
    case Kind::kCosine:
      return end + (1 - end) * (1 + std::cos(std::numbers::pi * x)) / 2;
    case Kind::kLinear:
      return 1 + (end - 1) * x;
    default:
      return end + (1 - end) * std::pow(1 - x, power);
  }
}

float Schedule::Scaled(float learning_rate, uint64_t position) const {
  return static_cast<float>(static_cast<double>(learning_rate) * Factor(position));
}

}  // namespace ps
