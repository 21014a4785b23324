#include <utility>

#include "common/check.h"
#include "server/modes/gather.h"

namespace ps {
namespace {

// A step is an exchange, of gradients or of weights; workers know which by their batch.
class AverageGradients final : public Barrier {
 public:
  using Barrier::Barrier;

  bool Takes(v1::Contribution /*contribution*/) const override { return true; }

  bool counts_for_any_owner() const override { return false; }
};

}  // namespace

// Where weights are averaged: after a round of batches the mean of all workers' differences is added. Source: Stich,
// Local SGD Converges Fast and Communicates Little, 2019 (arXiv:1805.09767).
std::unique_ptr<Mode> MakeLocalSgd(const ModeOptions& options, uint32_t num_workers) {
  v1::ModePolicy policy = Barrier::Policy();
  v1::LocalSteps& local = *policy.mutable_local_steps();
  local.set_steps(options.batches_per_round());
  if (options.local_sync != "gradients") {
    local.set_exchange(v1::LocalSteps::AVERAGE_WEIGHTS);
    return std::make_unique<BarrierOfRounds>(options, num_workers, std::move(policy));
  }
  local.set_exchange(v1::LocalSteps::AVERAGE_GRADIENTS);
  const absl::StatusOr<AverageEvery> every = ParseAverageEvery(options.average_every);
  Check(every.ok(), "the options are valid");
  local.set_average_every_steps(every->steps);
  local.set_average_every_epochs(every->epochs);
  return std::make_unique<AverageGradients>(options, num_workers, std::move(policy));
}

}  // namespace ps
