#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

// Between two averagings of weights a worker's own x drift from the servers' w: x takes the worker's steps, w only the
// averaged gradients', which x takes as well.
class AverageGradients final : public Steps {
 public:
  AverageGradients(const StepsContext& context, LocalTraining training, TensorMemory pulled, TensorMemory spare)
      : context_(context),
        averaging_(*context.client.policy().local_steps, context.feed.source().own_batches_per_epoch()),
        training_(std::move(training)),
        pulled_(std::move(pulled)),
        spare_(std::move(spare)) {
    CopyTensors(Read(training_.weights()), pulled_.tensors);
  }

  absl::Status Train(const TrainingBatch& batch) override;
  absl::Status Settle() override { return absl::OkStatus(); }  // No exchange outlasts Train.
  bool at_exchange() const override { return exchanged_; }
  absl::StatusOr<ConstTensors> ServersWeights() override { return pulled_.Read(); }

 private:
  // Each pushes, and brings what was pulled to x.
  absl::Status ExchangeGradients(const TrainingBatch& batch, StepRecord& record);
  absl::Status ExchangeWeights(StepRecord& record);

  StepsContext context_;
  const Averaging averaging_;
  LocalTraining training_;
  TensorMemory pulled_;   // The servers' weights w as they came last.
  TensorMemory spare_;    // For those that come next.
  uint64_t samples_ = 0;  // Since the last averaging of weights.
  uint64_t passed_ = 0;   // Since the last push.
  bool exchanged_ = false;
};

absl::Status AverageGradients::Train(const TrainingBatch& batch) {
  PS_ASSIGN_OR_RETURN(StepResult computed, ComputeBatch(context_, batch, {}));
  samples_ += batch.samples;
  passed_ += batch.samples;
  PS_ASSIGN_OR_RETURN(const NextBatch::Kind next, context_.feed.Peek());
  const Averaging::What what =
      next == NextBatch::Kind::kBatch ? averaging_.After(batch.place + 1) : Averaging::What::kWeights;
  exchanged_ = what != Averaging::What::kNothing;
  if (what != Averaging::What::kGradients && batch.samples > 0) training_.Apply(computed);
  training_.Passed(batch.samples);
  StepRecord record = training_.Record(batch, computed);
  if (what == Averaging::What::kGradients) PS_RETURN_IF_ERROR(ExchangeGradients(batch, record));
  if (what == Averaging::What::kWeights) PS_RETURN_IF_ERROR(ExchangeWeights(record));
  context_.stats.Add(record, Now());
  if (exchanged_) context_.feed.Finished(batch);
  return context_.feed.Prefetch();
}

absl::Status AverageGradients::ExchangeGradients(const TrainingBatch& batch, StepRecord& record) {
  context_.exchanges.Start(batch.samples, PushContribution::kGradient, Read(training_.gradients()), spare_.tensors,
                           /*deferred=*/false, std::exchange(passed_, 0));
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  PS_RETURN_IF_ERROR(training_.EndExchange(record));
  training_.SetPosition();
  AddDifference(spare_.Read(), pulled_.Read(), training_.weights());
  std::swap(pulled_, spare_);
  return absl::OkStatus();
}

absl::Status AverageGradients::ExchangeWeights(StepRecord& record) {
  Difference(1, Read(training_.weights()), pulled_.Read(), training_.gradients());
  context_.exchanges.Start(TakeSamples(samples_), PushContribution::kWeightDifference, Read(training_.gradients()),
                           training_.weights(), /*deferred=*/false, std::exchange(passed_, 0));
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  PS_RETURN_IF_ERROR(training_.EndExchange(record));
  training_.SetPosition();
  CopyTensors(Read(training_.weights()), pulled_.tensors);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeAverageGradients(const StepsContext& context) {
  PS_ASSIGN_OR_RETURN(LocalTraining training, LocalTraining::Create(context));
  PS_ASSIGN_OR_RETURN(TensorMemory pulled, training.AllocateCopy());
  PS_ASSIGN_OR_RETURN(TensorMemory spare, training.AllocateCopy());
  return std::make_unique<AverageGradients>(context, std::move(training), std::move(pulled), std::move(spare));
}

}  // namespace ps
