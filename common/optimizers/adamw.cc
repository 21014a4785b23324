#include "common/optimizers/adam_moments.h"

namespace ps {
namespace {

class AdamW final : public Optimizer {
 public:
  int state_tensors() const override { return 2; }
  void Apply(const OptimizerBlock& block, const UpdateContext& context, Isa isa) const override {
    const Hyperparameters& hyper = context.hyperparameters;
    ApplyAdam(block, context, /*l2=*/0, hyper.learning_rate * hyper.weight_decay, isa);
  }
};

}  // namespace

std::unique_ptr<Optimizer> MakeAdamW() { return std::make_unique<AdamW>(); }

}  // namespace ps
