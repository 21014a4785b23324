#include "common/optimizers/adam_moments.h"

namespace ps {
namespace {

class Adam final : public Optimizer {
 public:
  int state_tensors() const override { return 2; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    ApplyAdam(block, context, context.hyperparameters.weight_decay, /*decay=*/0, isa);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeAdam() { return std::make_unique<Adam>(); }

}  // namespace ps
