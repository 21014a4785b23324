#include <utility>

#include "server/modes/each_push.h"

namespace ps {

// Asynchronous elastic averaging: workers train weights x of their own, and after local_steps batches each takes
// a·(x − c) off them, which is added to the server's weights, the centre c.
// Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015 (arXiv:1412.6651), algorithm 1.
std::unique_ptr<Mode> MakeEasgd(const ModeOptions& options, uint32_t num_workers) {
  v1::ModePolicy policy;
  v1::LocalSteps& local = *policy.mutable_local_steps();
  local.set_exchange(v1::LocalSteps::ELASTIC);
  local.set_steps(options.batches_per_round());
  local.set_alpha(options.alpha(num_workers));
  return std::make_unique<EachPush>(options, num_workers, std::move(policy));
}

}  // namespace ps
