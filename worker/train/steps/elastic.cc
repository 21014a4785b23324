#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

// The servers' weights are the centre c. A round is `steps` batches; the last one may be shorter. What a worker takes
// off its own weights x is on its way to c while the worker goes on, until its next gradient is there.
// Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015 (arXiv:1412.6651), algorithm 1.
class Elastic final : public Steps {
 public:
  Elastic(const StepsContext& context, LocalTraining training, TensorMemory centre)
      : context_(context),
        local_(*context.client.policy().local_steps),
        training_(std::move(training)),
        centre_(std::move(centre)) {}

  absl::Status Train(const TrainingBatch& batch) override;
  absl::Status Settle() override;
  bool at_exchange() const override { return batches_ == 0; }
  absl::StatusOr<ConstTensors> ServersWeights() override;

 private:
  absl::Status EndRound(const TrainingBatch& batch, StepRecord record);

  StepsContext context_;
  const LocalSteps local_;
  LocalTraining training_;
  const TensorMemory centre_;  // As it came last.
  uint32_t batches_ = 0;       // Of the round so far.
  uint64_t samples_ = 0;       // Likewise.
  TrainingBatch pushed_;       // The last batch of the round whose push is under way.
  StepRecord record_;          // Of it.
};

absl::Status Elastic::Train(const TrainingBatch& batch) {
  absl::StatusOr<StepResult> computed = training_.Compute(batch, [this] { return Settle(); });
  if (!computed.ok()) return computed.status();
  PS_RETURN_IF_ERROR(Settle());  // A batch without samples has no backward pass.
  if (batch.samples > 0) training_.Apply(*computed);
  ++batches_;
  samples_ += batch.samples;
  training_.Passed(batch.samples);
  const absl::StatusOr<NextBatch::Kind> next = context_.feed.Peek();
  if (!next.ok()) return next.status();
  StepRecord record = training_.Record(batch, *computed);
  if (batches_ < local_.steps && *next == NextBatch::Kind::kBatch) {
    context_.stats.Add(record, Now());
  } else {
    PS_RETURN_IF_ERROR(EndRound(batch, std::move(record)));
  }
  return context_.feed.Prefetch();
}

absl::Status Elastic::EndRound(const TrainingBatch& batch, StepRecord record) {
  batches_ = 0;
  const uint32_t samples = TakeSamples(samples_);
  // A push without samples is an empty contribution, which this mode has no use for: x has not moved.
  if (samples == 0) {
    context_.stats.Add(record, Now());
    context_.feed.Finished(batch);
    return absl::OkStatus();
  }
  const TimePoint began = Now();
  const absl::StatusOr<ExchangeResult> pulled = context_.exchanges.Pull(centre_.tensors);
  if (!pulled.ok()) return pulled.status();
  training_.SetPosition(samples);  // Those of the round, which the servers do not know of yet.
  record.exchanged = *pulled;
  record.exposed_s = Seconds(Now() - began);
  Difference(local_.alpha, Read(training_.weights()), centre_.Read(), training_.gradients());
  Subtract(Read(training_.gradients()), training_.weights());
  context_.exchanges.Start(samples, PushContribution::kWeightDifference, Read(training_.gradients()), {},
                           /*deferred=*/false);
  pushed_ = batch;
  record_ = std::move(record);
  return absl::OkStatus();
}

absl::StatusOr<ConstTensors> Elastic::ServersWeights() {
  PS_RETURN_IF_ERROR(Settle());
  PS_RETURN_IF_ERROR(context_.exchanges.Pull(centre_.tensors).status());
  return centre_.Read();
}

absl::Status Elastic::Settle() {
  if (!context_.exchanges.under_way()) return absl::OkStatus();
  PS_RETURN_IF_ERROR(training_.EndExchange(record_));
  context_.stats.Add(record_, Now());
  context_.feed.Finished(pushed_);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeElastic(const StepsContext& context) {
  absl::StatusOr<LocalTraining> training = LocalTraining::Create(context);
  if (!training.ok()) return training.status();
  absl::StatusOr<TensorMemory> centre = training->AllocateCopy();
  if (!centre.ok()) return Annotate(centre.status(), "a copy of the weights");
  return std::make_unique<Elastic>(context, *std::move(training), *std::move(centre));
}

}  // namespace ps
