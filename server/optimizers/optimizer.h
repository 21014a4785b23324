// An optimizer is a function over a block of elements: gradient, weights and state in, weights and state out.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/simd.h"

namespace ps {

// The most floats of state that an optimizer keeps for each weight.
inline constexpr int kMaxStateTensors = 2;

// Names and meanings are PyTorch's (torch.optim).
struct Hyperparameters {
  float learning_rate = 0.1F;
  float momentum = 0.9F;
  float weight_decay = 0.0F;
};

// `elements` floats of each. An output may be the same memory as its input, and otherwise does not overlap it. 64-byte
// alignment is not required.
struct OptimizerBlock {
  size_t elements = 0;
  const float* gradient = nullptr;
  const float* weights = nullptr;
  float* new_weights = nullptr;
  const float* state[kMaxStateTensors] = {};
  float* new_state[kMaxStateTensors] = {};
};

// Thread-safe: it has no state of its own. Element i of the output depends on element i of the inputs only, so the cut
// into blocks does not change the result.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  virtual std::string name() const = 0;
  // Floats of state for each weight, zero before the first step.
  virtual int state_tensors() const = 0;
  virtual void Apply(const OptimizerBlock& block, const Hyperparameters& hyperparameters, Isa isa) const = 0;
};

// w ← w − lr·(g + wd·w)
std::unique_ptr<Optimizer> MakeSgd();

// v ← µ·v + g + wd·w;  w ← w − lr·v  (torch.optim.SGD with momentum, no dampening)
std::unique_ptr<Optimizer> MakeMomentum();

// The optimizer of this name (sgd, momentum). INVALID_ARGUMENT for any other.
absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const std::string& name);

}  // namespace ps
