#include <deque>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "worker/link/tensor_memory.h"
#include "worker/train/steps/local_training.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

// A gradient that is not pushed yet.
struct Held {
  TensorMemory gradients;
  uint64_t version = 0;  // The weights that it was computed on had this version; the next, by shard.
  std::vector<uint64_t> versions;
  TrainingBatch batch;
  StepResult computed;
};

// A batch counts as used as soon as its gradient is held: of a worker that is killed as many are lost.
class DelayedGradients final : public Steps {
 public:
  DelayedGradients(const StepsContext& context, std::vector<TensorMemory> memory)
      : context_(context),
        gradients_(Read(context.network.gradients())),
        weights_(context.network.parameters()),
        free_(std::move(memory)) {}

  absl::Status Train(const TrainingBatch& batch) override;
  absl::Status Settle() override;
  bool at_exchange() const override { return exchanged_; }
  absl::StatusOr<ConstTensors> ServersWeights() override { return Read(weights_); }

 private:
  // Pushes the oldest gradient that is held.
  absl::Status Push();

  StepsContext context_;
  const ConstTensors gradients_;  // The network's.
  const MutableTensors weights_;
  std::deque<Held> held_;
  std::vector<TensorMemory> free_;
  bool exchanged_ = false;
};

absl::Status DelayedGradients::Train(const TrainingBatch& batch) {
  PS_ASSIGN_OR_RETURN(const StepResult computed, ComputeBatch(context_, batch, {}));
  context_.feed.Finished(batch);  // Before it is pushed: the chief lets a worker hold two runs at most.
  held_.push_back({.gradients = std::move(free_.back()),
                   .version = context_.exchanges.version(),
                   .versions = context_.exchanges.versions(),
                   .batch = batch,
                   .computed = computed});
  free_.pop_back();
  CopyTensors(gradients_, held_.back().gradients.tensors);
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  exchanged_ = free_.empty();
  return free_.empty() ? Push() : absl::OkStatus();
}

absl::Status DelayedGradients::Settle() {
  while (!held_.empty()) PS_RETURN_IF_ERROR(Push());
  return absl::OkStatus();
}

absl::Status DelayedGradients::Push() {
  Held oldest = std::move(held_.front());
  held_.pop_front();
  const auto passed = oldest.batch.samples + static_cast<uint64_t>(context_.feed.TakeJumpedOver());
  context_.exchanges.SetRuns(oldest.batch.runs);
  context_.exchanges.StartEarlier(oldest.batch.samples, PushContribution::kGradient, oldest.version,
                                  std::move(oldest.versions), {}, oldest.gradients.Read(), weights_, passed);
  PS_ASSIGN_OR_RETURN(EndedExchange exchanged, context_.exchanges.End());
  context_.stats.Add(PushedRecord(oldest.batch, oldest.computed, std::move(exchanged)), Now());
  free_.push_back(std::move(oldest.gradients));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeDelayedGradients(const StepsContext& context) {
  if (context.client.mode() != "asp" || context.client.num_workers() != 1) {
    return FailedPrecondition("--experiment_staleness: is for --mode=asp with one worker; this job is --mode=",
                              context.client.mode(), " with ", context.client.num_workers());
  }
  std::vector<TensorMemory> memory;
  for (uint32_t i = 0; i <= context.delayed_pushes; ++i) {
    PS_ASSIGN_OR_RETURN(TensorMemory gradients,
                        Annotate(AllocateTensors(context.network.layout()), "gradients of --experiment_staleness"));
    memory.push_back(std::move(gradients));
  }
  return std::make_unique<DelayedGradients>(context, std::move(memory));
}

}  // namespace ps
