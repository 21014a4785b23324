#include "worker/steps/steps.h"

#include <algorithm>

#include "worker/steps/averaging.h"

namespace ps {

absl::StatusOr<std::unique_ptr<Steps>> MakeSteps(const StepsContext& context) {
  const ModePolicy& policy = context.client.policy();
  if (context.delayed_pushes > 0) return MakeDelayedGradients(context);
  if (!policy.local_steps.has_value()) return MakePushGradients(context);
  switch (policy.local_steps->exchange) {
    case LocalSteps::Exchange::kAverageWeights:
      return MakeAverageWeights(context);
    case LocalSteps::Exchange::kAverageGradients:
      return MakeAverageGradients(context);
    case LocalSteps::Exchange::kElastic:
      break;
  }
  return MakeElastic(context);
}

int64_t FirstBatch(const ModePolicy& policy, uint64_t start_step, int64_t batches_per_epoch, int64_t total_batches) {
  const auto step = static_cast<int64_t>(std::min(start_step, static_cast<uint64_t>(total_batches)));
  if (!policy.local_steps.has_value()) return step;
  const LocalSteps& local = *policy.local_steps;
  if (local.exchange != LocalSteps::Exchange::kAverageGradients) {
    return std::min(step * static_cast<int64_t>(local.steps), total_batches);
  }
  const Averaging averaging(local, static_cast<double>(batches_per_epoch));
  int64_t batch = 0;
  for (int64_t exchanges = 0; exchanges < step && batch < total_batches; ++batch) {
    if (averaging.After(batch + 1) != Averaging::What::kNothing) ++exchanges;
  }
  return batch;
}

}  // namespace ps
