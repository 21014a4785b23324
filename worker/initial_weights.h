// The weights that training begins with, or that are evaluated, where --init_weights gives them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

// Of each tensor of a layout, in order.
using Values = std::vector<std::vector<float>>;

struct InitialWeights {
  Values values;
  std::string source;    // What they are of: the file, or the checkpoint's folder.
  uint64_t version = 0;  // As that says; 0: it does not.
};

// The layout's tensors from a safetensors file, from a checkpoint's folder, or from a folder of checkpoints, of which
// the newest complete one is taken that can be read (ReadStoredWeights); others may be in it. No path gives no values.
// The errors name --init_weights, the file and the tensor: NOT_FOUND; INVALID_ARGUMENT if it is nothing of this kind,
// is damaged, or lacks a tensor of this name and shape.
absl::StatusOr<InitialWeights> ReadInitialWeights(const std::string& path, const Layout& layout);

// 32 hexadecimal digits that depend on the values alone, so that workers can tell whether they begin with the same.
std::string Fingerprint(const Values& values);

}  // namespace ps
