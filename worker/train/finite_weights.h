// Weights that are no numbers, or so large that what a network makes of them is none. Some layers hide it: relu makes 0
// of NaN, and the accuracy looks like any other.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// INVALID_ARGUMENT, naming the tensor and the element, if any of the values is infinite or no number.
absl::Status CheckFinite(const Layout& layout, const ConstTensors& weights);

// OUT_OF_RANGE if `value`, which is `what` ("the test loss"), is infinite or no number: with the tensor that has the
// largest weight, or one that is not finite itself.
absl::Status CheckOutcome(double value, const std::string& what, const Layout& layout, const ConstTensors& weights);

}  // namespace ps
