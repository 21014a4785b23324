#include "common/check.h"
#include "server/modes/gather.h"

namespace ps {
namespace {

// A step is a round of local_steps batches, after which the mean of all workers' differences of weights is added.
// Source: Stich, Local SGD Converges Fast and Communicates Little, 2019 (arXiv:1805.09767); with outer momentum
// Douillard et al., DiLoCo, 2023 (arXiv:2311.08105).
class AverageWeights final : public Barrier {
 public:
  using Barrier::Barrier;

  bool Takes(v1::Contribution contribution) const override {
    return contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE;
  }

  bool counts_for_any_owner() const override { return false; }

  v1::ModePolicy policy() const override {
    v1::ModePolicy policy = Barrier::policy();
    policy.mutable_local_steps()->set_exchange(v1::LocalSteps::AVERAGE_WEIGHTS);
    policy.mutable_local_steps()->set_steps(options().local_steps);
    return policy;
  }
};

// A step is an exchange, of gradients or of weights; workers know which by their batch.
class AverageGradients final : public Barrier {
 public:
  using Barrier::Barrier;

  bool Takes(v1::Contribution /*contribution*/) const override { return true; }

  bool counts_for_any_owner() const override { return false; }

  v1::ModePolicy policy() const override {
    v1::ModePolicy policy = Barrier::policy();
    v1::LocalSteps& local = *policy.mutable_local_steps();
    local.set_exchange(v1::LocalSteps::AVERAGE_GRADIENTS);
    local.set_steps(options().local_steps);
    const absl::StatusOr<AverageEvery> every = ParseAverageEvery(options().average_every);
    Check(every.ok(), "the options are valid");
    local.set_average_every_steps(every->steps);
    local.set_average_every_epochs(every->epochs);
    return policy;
  }
};

}  // namespace

std::unique_ptr<Mode> MakeLocalSgd(const ModeOptions& options, uint32_t num_workers) {
  if (options.local_sync == "gradients") return std::make_unique<AverageGradients>(options, num_workers);
  return std::make_unique<AverageWeights>(options, num_workers);
}

}  // namespace ps
