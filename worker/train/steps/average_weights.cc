#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

// Rounds of `steps` batches, the last one shorter. A worker that had no samples in a round has not moved.
class AverageWeights final : public Steps {
 public:
  AverageWeights(const StepsContext& context, LocalTraining training, TensorMemory pulled)
      : context_(context),
        round_(context.client.policy().local_steps->steps),
        training_(std::move(training)),
        pulled_(std::move(pulled)) {
    CopyTensors(Read(training_.weights()), pulled_.tensors);
  }

  absl::Status Train(const TrainingBatch& batch) override;
  absl::Status Settle() override { return absl::OkStatus(); }  // No exchange outlasts Train.
  bool at_exchange() const override { return batches_ == 0; }
  absl::StatusOr<ConstTensors> ServersWeights() override { return pulled_.Read(); }

 private:
  absl::Status EndRound(const TrainingBatch& batch, StepRecord record);

  StepsContext context_;
  const uint32_t round_;  // Batches.
  LocalTraining training_;
  const TensorMemory pulled_;  // The servers' weights as the round began.
  uint32_t batches_ = 0;       // Of the round so far.
  uint64_t samples_ = 0;       // Likewise.
};

absl::Status AverageWeights::Train(const TrainingBatch& batch) {
  absl::StatusOr<StepResult> computed = training_.Compute(batch);
  if (!computed.ok()) return computed.status();
  if (batch.samples > 0) training_.Apply(*computed);
  ++batches_;
  samples_ += batch.samples;
  training_.Passed(batch.samples);
  const absl::StatusOr<NextBatch::Kind> next = context_.feed.Peek();
  if (!next.ok()) return next.status();
  StepRecord record = training_.Record(batch, *computed);
  if (batches_ == round_ || *next != NextBatch::Kind::kBatch) return EndRound(batch, std::move(record));
  context_.stats.Add(record, Now());
  return context_.feed.Prefetch();
}

absl::Status AverageWeights::EndRound(const TrainingBatch& batch, StepRecord record) {
  const uint32_t samples = TakeSamples(samples_);
  Difference(1, Read(training_.weights()), pulled_.Read(), training_.gradients());
  context_.exchanges.Start(samples, PushContribution::kWeightDifference, Read(training_.gradients()),
                           training_.weights(), /*deferred=*/false);
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  PS_RETURN_IF_ERROR(training_.EndExchange(record));
  training_.SetPosition();
  context_.stats.Add(record, Now());
  CopyTensors(Read(training_.weights()), pulled_.tensors);
  batches_ = 0;
  context_.feed.Finished(batch);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeAverageWeights(const StepsContext& context) {
  absl::StatusOr<LocalTraining> training = LocalTraining::Create(context);
  if (!training.ok()) return training.status();
  absl::StatusOr<TensorMemory> pulled = training->AllocateCopy();
  if (!pulled.ok()) return Annotate(pulled.status(), "a copy of the weights");
  return std::make_unique<AverageWeights>(context, *std::move(training), *std::move(pulled));
}

}  // namespace ps
