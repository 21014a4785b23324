#include "worker/train/steps/steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/clock.h"
#include "common/status.h"

namespace ps {

absl::StatusOr<StepResult> ComputeBatch(const StepsContext& context, const TrainingBatch& batch,
                                        const StepHooks& hooks) {
  const TimePoint began = Now();
  absl::StatusOr<StepResult> computed = context.network.TrainStep(batch.data, hooks);
  if (!computed.ok()) return computed.status();
  if (context.pace != nullptr && batch.samples > 0) {
    PS_ASSIGN_OR_RETURN(computed->idle_s, context.pace->Idle(began));
  }
  computed->loss *= context.loss_unit;
  computed->forward_s += batch.loading_s;
  return computed;
}

StepRecord PushedRecord(const TrainingBatch& batch, const StepResult& computed, EndedExchange exchanged) {
  return {.batch = batch.place,
          .samples = batch.samples,
          .computed = computed,
          .push = std::move(exchanged.push),
          .exchanged = std::move(exchanged.result),
          .exposed_s = exchanged.exposed_s};
}

bool PushesGradients(const ModePolicy& policy, uint32_t delayed_pushes) {
  return delayed_pushes == 0 && !policy.local_steps.has_value();
}

absl::StatusOr<std::unique_ptr<Steps>> MakeSteps(const StepsContext& context) {
  const ModePolicy& policy = context.client.policy();
  if (PushesGradients(policy, context.delayed_pushes)) return MakePushGradients(context);
  if (context.delayed_pushes > 0) return MakeDelayedGradients(context);
  switch (policy.local_steps->exchange) {
    case LocalSteps::Exchange::kAverageWeights: {
      const LocalSteps& local = *policy.local_steps;
      const bool whole = local.fragments.size() <= 1 && local.overlap == 0 && local.mix == 0;
      return whole ? MakeAverageWeights(context) : MakeAverageFragments(context);
    }
    case LocalSteps::Exchange::kAverageGradients:
      return MakeAverageGradients(context);
    case LocalSteps::Exchange::kElastic:
      break;
  }
  return MakeElastic(context);
}

Averaging::Averaging(const LocalSteps& local, double batches_per_epoch)
    : gradients_every_(local.steps),
      weights_every_(local.average_every_steps > 0 ? static_cast<double>(local.average_every_steps)
                                                   : local.average_every_epochs * batches_per_epoch) {}

// With a margin for what rounding takes, so that a whole number is reached.
int64_t Averaging::Averagings(int64_t batches) const {
  return static_cast<int64_t>(std::floor(static_cast<double>(batches) / weights_every_ + 1e-9));
}

Averaging::What Averaging::After(int64_t number) const {
  if (Averagings(number) > Averagings(number - 1)) return What::kWeights;
  return gradients_every_ > 0 && number % gradients_every_ == 0 ? What::kGradients : What::kNothing;
}

ShareOrigin OriginOf(const Client::Resized& resized, int64_t epoch_samples, int64_t batches_per_epoch) {
  constexpr uint64_t kMost = uint64_t{1} << 40;  // It comes from the wire.
  const auto samples = static_cast<int64_t>(std::min(resized.samples, kMost));
  const int64_t in_epoch = samples % epoch_samples;  // Batches that were not used as a whole are used again.
  const int64_t batches = static_cast<int64_t>(static_cast<double>(in_epoch) / static_cast<double>(epoch_samples) *
                                               static_cast<double>(batches_per_epoch));
  return {.step = resized.step, .batch = samples / epoch_samples * batches_per_epoch + batches};
}

int64_t FirstBatch(const ModePolicy& policy, uint64_t start_step, int64_t batches_per_epoch, int64_t total_batches,
                   const std::function<int64_t(int64_t batch)>& samples_of, const ShareOrigin& origin) {
  const uint64_t since = start_step - std::min(origin.step, start_step);
  const auto step = static_cast<int64_t>(std::min(since, static_cast<uint64_t>(total_batches)));
  int64_t batch = std::min(origin.batch, total_batches);
  if (policy.local_steps.has_value() && policy.local_steps->exchange == LocalSteps::Exchange::kAverageGradients) {
    const Averaging averaging(*policy.local_steps, static_cast<double>(batches_per_epoch));
    for (int64_t exchanges = 0; exchanges < step && batch < total_batches; ++batch) {
      if (averaging.After(batch + 1) != Averaging::What::kNothing) ++exchanges;
    }
    return batch;
  }
  const int64_t round = policy.local_steps.has_value() ? policy.local_steps->steps : 1;
  if (policy.empty_contributions || !samples_of) return std::min(batch + step * round, total_batches);
  for (int64_t pushes = 0; pushes < step && batch < total_batches;) {
    int64_t samples = 0;
    for (const int64_t end = std::min(batch + round, total_batches); batch < end; ++batch) samples += samples_of(batch);
    if (samples > 0) ++pushes;
  }
  return batch;
}

}  // namespace ps
