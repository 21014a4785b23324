// The weights that training begins with, or that are evaluated, where --init_weights gives them, and whether weights
// are numbers that a network makes something of.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/tensor.h"

namespace ps {

// The values of each tensor of a layout, in order.
using Values = std::vector<std::vector<float>>;

struct InitialWeights {
  Values values;
  std::string source;              // What they are of: the file, or the checkpoint's folder.
  std::vector<std::string> notes;  // What the log is to say: tensors that were converted, or that no layer wants.
  uint64_t version = 0;            // The source says it; 0: it does not.
  std::map<std::string, std::string> metadata;  // What a file says besides.
};

// The layout's tensors from a safetensors file, from a checkpoint's folder, or from a folder of checkpoints, of which
// the newest complete one is taken that can be read (ReadStoredWeights); others may be in it. A file's float64, float16
// and bfloat16 become float32. No path gives no values. The errors name --init_weights, the file and the tensor:
// NOT_FOUND; INVALID_ARGUMENT if it is nothing of this kind, is damaged, lacks a tensor of this name and shape, or if a
// value is not finite.
absl::StatusOr<InitialWeights> ReadInitialWeights(const std::string& path, const Layout& layout);

// 32 hexadecimal digits that depend on the values alone, so that workers can tell whether they begin with the same.
std::string Fingerprint(const Values& values);

// OUT_OF_RANGE if `value`, which is `what` ("the test loss"), is infinite or no number: with the tensor that has the
// largest weight, or one that is not finite itself. Some layers hide such weights: relu makes 0 of NaN, and the
// accuracy looks like any other.
absl::Status CheckOutcome(double value, const std::string& what, const Layout& layout, const ConstTensors& weights);

}  // namespace ps
