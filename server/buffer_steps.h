// What becomes of buffers in an update: tensors that are pushed but have no gradient (TensorKind, in ps.proto). Each
// rule is an optimizer without state, and has no use for hyperparameters; what it takes for the gradient is what is
// pushed.
#pragma once

#include <memory>

#include "common/optimizers/optimizer.h"
#include "ps/tensor.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// w ← w + share·(g − w); with a share of 1, w ← g.
std::unique_ptr<Optimizer> MakeMoveTowards(float share);

class BufferSteps {
 public:
  // `mean_share`: how far a buffer of the mean moves towards what is pushed (Mode::buffer_share).
  explicit BufferSteps(float mean_share);

  // What steps a buffer of this kind, where pushes carry this. Differences are added.
  const Optimizer& Of(TensorKind kind, v1::Contribution contribution) const;

 private:
  const std::unique_ptr<Optimizer> assign_;
  const std::unique_ptr<Optimizer> mean_;
  const std::unique_ptr<Optimizer> add_;
};

}  // namespace ps
