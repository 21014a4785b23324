#include <utility>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/steps.h"

namespace ps {
namespace {

class PushGradients final : public Steps {
 public:
  explicit PushGradients(const StepsContext& context)
      : context_(context),
        // An early layer's weights are computed on while later ones come only where they cannot be of another version.
        into_forward_(context.overlap && context.client.policy().exact_versions),
        gradients_(Read(context.network.gradients())),
        weights_(context.network.parameters()) {
    context_.exchanges.SetRounded(context.network.rounds());
  }

  absl::Status Train(const TrainingBatch& batch) override;
  absl::Status Settle() override;
  bool at_exchange() const override { return true; }
  absl::StatusOr<ConstTensors> ServersWeights() override;

 private:
  absl::Status Compute(const TrainingBatch& batch);
  void Start(uint32_t samples, bool deferred) {
    const uint64_t passed = samples + static_cast<uint64_t>(context_.feed.TakeJumpedOver());
    context_.exchanges.StartView(samples, gradients_, weights_, deferred, passed);
  }
  // Also while the network still reads an older view, which is another version: the link to the server has ended.
  absl::Status AwaitWeights(size_t tensor) {
    const bool views = context_.exchanges.viewing() || !context_.exchanges.view().tensors.empty();
    return views ? Settle() : context_.exchanges.AwaitTensor(tensor);
  }

  StepsContext context_;
  const bool into_forward_;
  const ConstTensors gradients_;
  const MutableTensors weights_;
  TrainingBatch pushed_;  // The batch whose exchange is under way.
  StepResult computed_;   // What computing that batch gave.
};

absl::Status PushGradients::Train(const TrainingBatch& batch) {
  if (batch.samples == 0 && !context_.client.policy().empty_contributions) {
    context_.feed.Finished(batch);
    return context_.feed.Prefetch();
  }
  PS_RETURN_IF_ERROR(Compute(batch));
  pushed_ = batch;
  PS_RETURN_IF_ERROR(context_.feed.Prefetch());
  return into_forward_ ? absl::OkStatus() : Settle();
}

// The exchange begins before the gradients are there, and takes each as soon as it is final. While the servers are at
// work the next batch is prepared.
absl::Status PushGradients::Compute(const TrainingBatch& batch) {
  const bool idles = context_.pace != nullptr && context_.pace->idles();
  const bool overlap = context_.overlap && batch.samples > 0 && !idles;
  if (idles) PS_RETURN_IF_ERROR(Settle());  // The batch's time begins when its weights are there.
  StepHooks hooks;
  hooks.parameters_needed = [this](size_t tensor) { return AwaitWeights(tensor); };
  hooks.before_backward = [&]() -> absl::Status {
    PS_RETURN_IF_ERROR(Settle());
    if (overlap) Start(batch.samples, /*deferred=*/true);
    return absl::OkStatus();
  };
  if (overlap) {
    hooks.gradient_ready = [this](size_t tensor, bool finite) {
      context_.exchanges.TensorReady(tensor, finite);
      return absl::OkStatus();
    };
  }
  PS_ASSIGN_OR_RETURN(const StepResult computed, ComputeBatch(context_, batch, hooks));
  if (batch.samples == 0) PS_RETURN_IF_ERROR(Settle());
  if (!overlap) Start(batch.samples, /*deferred=*/false);
  computed_ = computed;
  return absl::OkStatus();
}

absl::Status PushGradients::Settle() {
  if (!context_.exchanges.under_way()) return absl::OkStatus();
  const uint64_t next_step = context_.exchanges.step() + 1;
  PS_ASSIGN_OR_RETURN(EndedExchange exchanged, context_.exchanges.End());
  const WeightsView& view = context_.exchanges.view();
  context_.network.ReadParameters(view.tensors, view.pages);
  context_.stats.Add(PushedRecord(pushed_, computed_, std::move(exchanged)), Now());
  context_.feed.Finished(pushed_);
  const bool left_behind = context_.client.synchronous() && context_.exchanges.step() > next_step;
  if (left_behind) {
    const ShareOrigin& origin = context_.origin;
    context_.feed.SkipTo(static_cast<uint64_t>(origin.batch) + context_.exchanges.step() - origin.step);
  }
  return absl::OkStatus();
}

absl::StatusOr<ConstTensors> PushGradients::ServersWeights() {
  PS_RETURN_IF_ERROR(Settle());
  const ConstTensors& view = context_.exchanges.view().tensors;
  return view.empty() ? Read(weights_) : view;
}

}  // namespace

std::unique_ptr<Steps> MakePushGradients(const StepsContext& context) {
  return std::make_unique<PushGradients>(context);
}

}  // namespace ps
