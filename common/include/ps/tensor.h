// A model's parameters as the system sees them: an ordered list of named float32 tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ps {

// What becomes of a tensor in an update; see ps.proto, TensorKind.
enum class TensorKind : int {
  kWeight = 0,        // The optimizer steps it by its gradient.
  kConstant = 1,      // It stays as it was initialised: it is pulled by Pull and Start alone, and never pushed.
  kBufferLowest = 2,  // It becomes the value that the lowest rank pushes,
  kBufferMean = 3,    // or the mean of the pushed values.
};

// Whether a push carries the tensor.
constexpr bool IsPushed(TensorKind kind) { return kind != TensorKind::kConstant; }

// One named tensor. Elements are float32 in row-major order.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;  // Each dimension is at least 1; an empty shape is a scalar.
  // The optimizer's learning rate and weight decay, times these, are this tensor's. Finite, at least 0.
  float learning_rate_factor = 1;
  float weight_decay_factor = 1;
  TensorKind kind = TensorKind::kWeight;
  // The group of OptimizerSettings::groups whose hyperparameters it has; 0: those of all.
  uint32_t group = 0;

  int64_t elements() const {
    int64_t count = 1;
    for (int64_t dimension : shape) count *= dimension;
    return count;
  }
  bool operator==(const TensorSpec&) const = default;
};

// The layout of a model: its tensors, in the same order in every process.
using Layout = std::vector<TensorSpec>;

// "layer0.weight [64, 784]", for messages.
std::string ToString(const TensorSpec& tensor);

// "a weight", for messages; "" if there is no such kind.
std::string ToString(TensorKind kind);

}  // namespace ps
