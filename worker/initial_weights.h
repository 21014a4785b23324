// The weights that training begins with, where --init_weights gives them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

// Of each tensor of a layout, in order.
using Values = std::vector<std::vector<float>>;

// The layout's tensors from a safetensors file; others may be in it. No path gives no values. The errors name
// --init_weights, the file and the tensor: NOT_FOUND; INVALID_ARGUMENT if it is no such file or lacks a tensor of this
// name and shape.
absl::StatusOr<Values> ReadInitialWeights(const std::string& path, const Layout& layout);

// 32 hexadecimal digits that depend on the values alone, so that workers can tell whether they begin with the same.
std::string Fingerprint(const Values& values);

}  // namespace ps
