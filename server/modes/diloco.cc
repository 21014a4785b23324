#include <utility>

#include "server/modes/each_push.h"
#include "server/modes/gather.h"

namespace ps {
namespace {

// A step is a long round of batches, after which servers apply their outer optimizer to the mean of all workers'
// differences of weights. Source: Douillard et al., DiLoCo, 2023 (arXiv:2311.08105).
class DilocoBarrier final : public BarrierOfRounds {
 public:
  using BarrierOfRounds::BarrierOfRounds;

  bool weighs_by_samples() const override { return options().outer_weighting == "samples"; }
};

// Nobody waits: each difference is applied when it comes, whatever version it began with. Source: Liu et al.,
// Asynchronous Local-SGD Training for Language Modeling, 2024 (arXiv:2401.09135).
class DilocoAsync final : public EachPush {
 public:
  using EachPush::EachPush;

  bool Takes(v1::Contribution contribution) const override {
    return contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE;
  }
  float difference_share() const override { return 1.0F / static_cast<float>(options().buffer(num_workers())); }
};

}  // namespace

std::unique_ptr<Mode> MakeDiloco(const ModeOptions& options, uint32_t num_workers) {
  const bool async = options.outer_sync == "async";
  v1::ModePolicy policy = async ? v1::ModePolicy() : Barrier::Policy();
  v1::LocalSteps& local = *policy.mutable_local_steps();
  local.set_steps(options.batches_per_round() / options.fragments);  // From one fragment to the next.
  local.set_fragments(options.fragments);
  local.set_overlap(options.overlap);
  local.set_mix(options.mix);
  local.set_exchange(v1::LocalSteps::AVERAGE_WEIGHTS);
  if (async) return std::make_unique<DilocoAsync>(options, num_workers, std::move(policy));
  return std::make_unique<DilocoBarrier>(options, num_workers, std::move(policy));
}

}  // namespace ps
