#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"

namespace ps {
namespace {

// A worker that had no samples in a round has not moved.
class AverageWeights final : public Rounds {
 public:
  AverageWeights(const StepsContext& context, LocalTraining training, TensorMemory servers)
      : Rounds(context, std::move(training), std::move(servers)) {
    CopyTensors(Read(training_.weights()), servers_.tensors);
  }

  absl::Status Settle() override { return absl::OkStatus(); }  // No exchange outlasts Train.
  absl::StatusOr<ConstTensors> ServersWeights() override { return servers_.Read(); }

 private:
  absl::Status EndRound(const TrainingBatch& batch, uint32_t samples, StepRecord record) override;
};

absl::Status AverageWeights::EndRound(const TrainingBatch& batch, uint32_t samples, StepRecord record) {
  Difference(1, Read(training_.weights()), servers_.Read(), training_.gradients());
  context_.exchanges.Start(samples, PushContribution::kWeightDifference, Read(training_.gradients()),
                           training_.weights(), /*deferred=*/false);
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  PS_RETURN_IF_ERROR(training_.EndExchange(record));
  training_.SetPosition();
  context_.stats.Add(record, Now());
  CopyTensors(Read(training_.weights()), servers_.tensors);
  context_.feed.Finished(batch);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeAverageWeights(const StepsContext& context) {
  return MakeRounds<AverageWeights>(context);
}

}  // namespace ps
