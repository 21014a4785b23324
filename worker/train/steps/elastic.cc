#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"

namespace ps {
namespace {

// The servers' weights are the centre c. What a worker takes off its own weights x is on its way to c while the worker
// goes on, until its next gradient is there.
// Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015 (arXiv:1412.6651), algorithm 1.
class Elastic final : public Rounds {
 public:
  using Rounds::Rounds;
  absl::Status Settle() override;
  absl::StatusOr<ConstTensors> ServersWeights() override;

 private:
  absl::Status EndRound(const TrainingBatch& batch, uint32_t samples, StepRecord record) override;

  TrainingBatch pushed_;  // The last batch of the round whose push is under way, and its record.
  StepRecord record_;
};

absl::Status Elastic::EndRound(const TrainingBatch& batch, uint32_t samples, StepRecord record) {
  const TimePoint began = Now();
  PS_ASSIGN_OR_RETURN(const ExchangeResult pulled, context_.exchanges.Pull(servers_.tensors));
  training_.SetPosition(samples);  // Those of the round, which the servers do not know of yet.
  record.exchanged = pulled;
  record.exposed_s = Seconds(Now() - began);
  Difference(context_.client.policy().local_steps->alpha, Read(training_.weights()), servers_.Read(),
             training_.gradients());
  Subtract(Read(training_.gradients()), training_.weights());
  context_.exchanges.Start(samples, PushContribution::kWeightDifference, Read(training_.gradients()), {},
                           /*deferred=*/false);
  pushed_ = batch;
  record_ = std::move(record);
  return absl::OkStatus();
}

absl::StatusOr<ConstTensors> Elastic::ServersWeights() {
  PS_RETURN_IF_ERROR(Settle());
  PS_RETURN_IF_ERROR(context_.exchanges.Pull(servers_.tensors).status());
  return servers_.Read();
}

absl::Status Elastic::Settle() {
  if (!context_.exchanges.under_way()) return absl::OkStatus();
  PS_RETURN_IF_ERROR(training_.EndExchange(record_));
  context_.stats.Add(record_, Now());
  context_.feed.Finished(pushed_);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeElastic(const StepsContext& context) { return MakeRounds<Elastic>(context); }

}  // namespace ps
