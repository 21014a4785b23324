#include "worker/train/finite_weights.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "absl/strings/str_cat.h"
#include "common/simd.h"
#include "common/status.h"

namespace ps {
namespace {

// The sign of NaN says nothing.
std::string Text(double value) { return std::isnan(value) ? "nan" : absl::StrCat(value); }

}  // namespace

absl::Status CheckFinite(const Layout& layout, const ConstTensors& weights) {
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    const std::span<const float> values = weights[tensor];
    if (AllFinite(values.data(), values.size(), BestIsa())) continue;
    const auto bad = std::find_if_not(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
    return absl::InvalidArgumentError(absl::StrCat("tensor ", ToString(layout[tensor]), ": element ",
                                                   bad - values.begin(), " is ", Text(*bad),
                                                   "; expected finite numbers within float32"));
  }
  return absl::OkStatus();
}

absl::Status CheckOutcome(double value, const std::string& what, const Layout& layout, const ConstTensors& weights) {
  if (std::isfinite(value)) return absl::OkStatus();
  const std::string found = absl::StrCat(what, " is ", Text(value));
  if (const absl::Status finite = CheckFinite(layout, weights); !finite.ok()) {
    return absl::OutOfRangeError(absl::StrCat(found, ": ", Message(finite)));
  }
  float largest = 0;
  size_t where = 0;
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    for (const float weight : weights[tensor]) {
      if (std::abs(weight) <= largest) continue;
      largest = std::abs(weight);
      where = tensor;
    }
  }
  return absl::OutOfRangeError(
      absl::StrCat(found, ": the weights are finite, but too large for their outputs to be; the ", "largest is ",
                   largest, ", in tensor ", ToString(layout[where]), " (is the learning rate too high?)"));
}

}  // namespace ps
