// An optimizer is a function over a block of elements: gradient, weights and state in, weights and state out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/optimizers/hyperparameters.h"
#include "common/simd.h"

namespace ps {

// The most floats of state that an optimizer keeps for each weight.
inline constexpr int kMaxStateTensors = 2;

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

// What holds for a whole update. All blocks of one tensor get the same; tensors, and updates, may differ in their
// hyperparameters.
struct UpdateContext {
  // How many updates these weights have had when this one is done: 1 for the first, which is what bias correction
  // starts from. On a server it is the version that the update makes, less those made without a gradient of them.
  uint64_t update = 1;
  // Those of this update and tensor: the learning rate is the one to step with, whatever it was derived from.
  Hyperparameters hyperparameters;
  // This tensor's trust ratio (TrustRatio of what its blocks measure), for an optimizer that uses one.
  float trust_ratio = 1;
};

// The sums of squares that a tensor's trust ratio is made of.
struct TrustSquares {
  double weights = 0;
  double update = 0;  // What the optimizer takes off the weights but for the learning rate and the ratio.
};

// ‖weights‖ / ‖update‖, and 1 where one of them is 0.
float TrustRatio(const TrustSquares& squares);

// Thread-safe: it has no state of its own. Element i of the output depends on element i of the inputs and the context
// only, so the cut into blocks does not change the result.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Floats of state for each weight, at most kMaxStateTensors.
  virtual int state_tensors() const = 0;
  // What every float of state tensor k, below state_tensors(), is before the first update.
  virtual float InitialState(int /*k*/, const Hyperparameters& /*hyperparameters*/) const { return 0; }
  virtual void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const = 0;
  // Whether with these an element whose gradient is 0 stays as it is, to the bit.
  virtual bool keeps_still(const Hyperparameters& /*hyperparameters*/) const { return false; }
  // Whether a tensor's step depends on a trust ratio, which is found from the whole tensor: Measure, then Apply.
  virtual bool uses_trust_ratio() const { return false; }
  // What these elements add to the squares of their tensor. Nothing of the block is written. It depends on the elements
  // and their order alone.
  virtual TrustSquares Measure(const OptimizerBlock& /*block*/, const UpdateContext& /*context*/, Isa /*isa*/) const {
    return {};
  }
};

// w ← w − lr·(g + wd·w)
std::unique_ptr<Optimizer> MakeSgd();

// v ← µ·v + g + wd·w;  w ← w − lr·v  (torch.optim.SGD with momentum, no dampening). v is 0 at first.
std::unique_ptr<Optimizer> MakeMomentum();

// v ← µ·v + g + wd·w;  w ← w − lr·(g + wd·w + µ·v)  (torch.optim.SGD with nesterov=True). v is 0 at first.
std::unique_ptr<Optimizer> MakeNesterov();

// s ← s + g²;  w ← w − lr / (1 + (t − 1)·lr_decay) · g / (√s + eps), where g has wd·w added and t is the update. s is
// initial_accumulator_value at first. Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011.
std::unique_ptr<Optimizer> MakeAdagrad();

// s ← α·s + (1 − α)·g²;  w ← w − lr·g / (√s + eps), where g has wd·w added. s is 0 at first. Source: Tieleman and
// Hinton, Lecture 6.5, 2012; eps is outside the root, as torch.optim has it.
std::unique_ptr<Optimizer> MakeRmsprop();

// m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²;  w ← w − lr·m̂ / (√v̂ + eps), where g has wd·w added, and m̂ = m / (1 −
// β₁ᵗ) and v̂ = v / (1 − β₂ᵗ) in update t. m and v are 0 at first. Source: Kingma and Ba, Adam, 2015 (arXiv:1412.6980).
std::unique_ptr<Optimizer> MakeAdam();

// Adam, but with nothing added to g: w ← w − lr·wd·w − lr·m̂ / (√v̂ + eps). Source: Loshchilov and Hutter, Decoupled
// Weight Decay Regularization, 2019 (arXiv:1711.05101).
std::unique_ptr<Optimizer> MakeAdamW();

// m and v as Adam's, of g alone;  u = m̂ / (√v̂ + eps) + wd·w;  w ← w − lr·‖w‖/‖u‖·u, where the norms are those of the
// whole tensor (the trust ratio), and the ratio is 1 if one of them is 0. Source: You et al., Large Batch Optimization
// for Deep Learning, 2020 (arXiv:1904.00962), algorithm 2.
std::unique_ptr<Optimizer> MakeLamb();

// Outer optimizers are given a difference of weights d, which workers have made by steps of their own, in the place of
// the gradient. Their hyperparameters are outer_lr, ε, and outer_momentum, µ; none has weight decay.

// The step that the optimizer of this name (one of OuterOptimizerNames) takes for the gradient −d; what else it is set
// with has its defaults. So sgd is w ← w + ε·d, and nesterov v ← µ·v + d;  w ← w + ε·(d + µ·v). Source: Douillard et
// al., DiLoCo, 2023 (arXiv:2311.08105), algorithm 1.
std::unique_ptr<Optimizer> MakeOuterOptimizer(const std::string& name);

// For differences that come one by one, from workers that do not wait for each other; `buffer`, N, of them weigh as
// much as one mean of all: D ← D + d, and w ← w + ε·d/N; but in every N-th update m ← µ·m + D/N;  w ← w + ε·(µ·m +
// d/N);  D ← 0. With N = 1 it is outer nesterov. Without `momentum`, µ is 0, and it has no state. Source: Liu et al.,
// Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135), algorithm 3 with c = 0.
std::unique_ptr<Optimizer> MakeDelayedNesterov(uint32_t buffer, bool momentum);

// The names that MakeOuterOptimizer knows.
std::vector<std::string> OuterOptimizerNames();

// The names that MakeOptimizer knows.
std::vector<std::string> OptimizerNames();

// "sgd, momentum, … or lamb": the names, for help and messages.
std::string OptimizerChoices();
std::string OuterOptimizerChoices();

// The optimizer of this name. INVALID_ARGUMENT, naming the flag and the choices, for any other.
absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const std::string& name);

}  // namespace ps
