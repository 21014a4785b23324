#include <algorithm>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "worker/train/steps/local_training.h"

namespace ps {
namespace {

// The model is averaged in fragments, one after the other. After every `steps` batches the weights w of one are taken,
// whose difference was pushed `overlap` batches before: meanwhile the worker has trained on. Its own become
// mix * x + (1 - mix) * w, and what it pushes of this fragment next is their difference from w. At the end all
// fragments are pushed and taken, so that nothing is left that the servers do not have. Source: Douillard et al.,
// Streaming DiLoCo with overlapping communication, 2025 (arXiv:2501.18512), algorithm 2.
class AverageFragments final : public Steps {
 public:
  AverageFragments(const StepsContext& context, LocalTraining training, TensorMemory anchors, TensorMemory differences)
      : context_(context),
        local_(*context.client.policy().local_steps),
        training_(std::move(training)),
        anchors_(std::move(anchors)),
        differences_(std::move(differences)) {
    CopyTensors(Read(training_.weights()), anchors_.tensors);
    for (const std::vector<uint32_t>& tensors : local_.fragments) AddFragment(tensors);
    if (!fragments_.empty()) return;
    std::vector<uint32_t> all;
    for (uint32_t tensor = 0; tensor < context.layout.size(); ++tensor) {
      if (IsPushed(context.layout[tensor].kind)) all.push_back(tensor);
    }
    AddFragment(std::move(all));
  }

  absl::Status Train(const TrainingBatch& batch) override;
  // Takes what is under way, before its time if need be.
  absl::Status Settle() override;
  absl::Status Conclude() override;
  bool at_exchange() const override { return at_exchange_; }
  uint64_t open_samples() const override;
  absl::StatusOr<ConstTensors> ServersWeights() override;

 private:
  struct Fragment {
    std::vector<uint32_t> tensors;
    // The versions that its weights are of, as they came last.
    uint64_t version = 0;
    std::vector<uint64_t> versions;
    uint64_t samples = 0;  // Since it was pushed last.
  };
  void AddFragment(std::vector<uint32_t> tensors) {
    fragments_.push_back({.tensors = std::move(tensors),
                          .version = context_.exchanges.version(),
                          .versions = context_.exchanges.versions()});
  }
  Fragment& Next() { return fragments_[context_.exchanges.step() % fragments_.size()]; }
  void StartPush(uint32_t samples, const Fragment& fragment) {
    context_.exchanges.StartEarlier(samples, PushContribution::kWeightDifference, fragment.version, fragment.versions,
                                    fragment.tensors, differences_.Read(), anchors_.tensors, std::exchange(passed_, 0));
  }
  // Pushes the next fragment after this batch, unless there is nothing to push.
  void Push(const TrainingBatch& batch);
  // Waits for the weights of the fragment that is under way, if one is, and makes them the worker's.
  absl::Status Take(StepRecord& record);
  void Blend(const Fragment& fragment);

  StepsContext context_;
  const LocalSteps local_;
  LocalTraining training_;
  const TensorMemory anchors_;      // The servers' weights, as each fragment's came last.
  const TensorMemory differences_;  // What is pushed, while the worker trains on.
  std::vector<Fragment> fragments_;
  uint32_t batches_ = 0;        // Since weights were taken last, or were to be.
  uint64_t passed_ = 0;         // Samples since the last push.
  Fragment* pushed_ = nullptr;  // The one that is under way,
  uint64_t pushed_samples_ = 0;
  TrainingBatch pushed_after_;  // and the batch that it followed.
  bool at_exchange_ = false;
};

absl::Status AverageFragments::Train(const TrainingBatch& batch) {
  PS_ASSIGN_OR_RETURN(StepResult computed, ComputeBatch(context_, batch, {}));
  if (batch.samples > 0) training_.Apply(computed);
  PS_RETURN_IF_ERROR(context_.client.CountLocalStep());
  ++batches_;
  passed_ += batch.samples;
  for (Fragment& fragment : fragments_) fragment.samples += batch.samples;
  training_.Passed(batch.samples);
  PS_ASSIGN_OR_RETURN(const NextBatch::Kind next, context_.feed.Peek());
  StepRecord record = training_.Record(batch, computed);
  const bool ends = next != NextBatch::Kind::kBatch;
  if (!ends && batches_ == local_.steps - local_.overlap) Push(batch);
  at_exchange_ = ends || batches_ == local_.steps;
  if (at_exchange_) {
    PS_RETURN_IF_ERROR(context_.feed.Prefetch());
    PS_RETURN_IF_ERROR(Take(record));
    for (size_t i = 0; ends && i < fragments_.size(); ++i) {
      Push(batch);
      PS_RETURN_IF_ERROR(Take(record));
    }
    batches_ = 0;
    if (ends) context_.feed.Finished(batch);
  }
  context_.stats.Add(record, Now());
  return context_.feed.Prefetch();
}

void AverageFragments::Push(const TrainingBatch& batch) {
  Fragment& fragment = Next();
  pushed_after_ = batch;
  // Nobody waits for a push without samples, and the weights have not moved.
  if (fragment.samples == 0 && !context_.client.policy().empty_contributions) {
    context_.feed.Finished(batch);
    return;
  }
  for (const uint32_t tensor : fragment.tensors) {
    const std::span<float> difference = differences_.tensors[tensor];
    for (size_t i = 0; i < difference.size(); ++i) {
      difference[i] = training_.weights()[tensor][i] - anchors_.tensors[tensor][i];
    }
  }
  pushed_ = &fragment;
  pushed_samples_ = fragment.samples;
  StartPush(TakeSamples(fragment.samples), fragment);
}

absl::Status AverageFragments::Take(StepRecord& record) {
  if (pushed_ == nullptr) return absl::OkStatus();
  PS_RETURN_IF_ERROR(training_.EndExchange(record));
  Fragment& fragment = *std::exchange(pushed_, nullptr);
  pushed_samples_ = 0;
  fragment.version = context_.exchanges.version();
  fragment.versions = context_.exchanges.versions();
  Blend(fragment);
  training_.SetPosition(passed_ * context_.client.num_workers());  // The others are taken to be as fast.
  context_.feed.Finished(pushed_after_);
  return absl::OkStatus();
}

void AverageFragments::Blend(const Fragment& fragment) {
  for (const uint32_t tensor : fragment.tensors) {
    const std::span<float> own = training_.weights()[tensor];
    const std::span<const float> anchor = anchors_.tensors[tensor];
    if (local_.mix == 0) {
      std::copy(anchor.begin(), anchor.end(), own.begin());
      continue;
    }
    for (size_t i = 0; i < own.size(); ++i) own[i] = local_.mix * own[i] + (1 - local_.mix) * anchor[i];
  }
}

absl::Status AverageFragments::Settle() {
  StepRecord unrecorded;
  return Take(unrecorded);
}

// A worker that took another's place after the last batch finds none, and perhaps some of the last pushes to be made.
absl::Status AverageFragments::Conclude() {
  const bool waited_for = context_.client.policy().empty_contributions && !context_.client.hands_out_runs();
  const auto batches = static_cast<uint64_t>(context_.feed.source().total_batches() - context_.origin.batch);
  const uint64_t on_the_way = (batches + local_.overlap - 1) / local_.steps;
  const uint64_t all = context_.origin.step + on_the_way + fragments_.size();
  while (waited_for && batches > 0 && context_.exchanges.step() < all) {
    StartPush(/*samples=*/0, Next());
    PS_RETURN_IF_ERROR(context_.exchanges.End().status());
  }
  return absl::OkStatus();
}

uint64_t AverageFragments::open_samples() const {
  uint64_t most = pushed_samples_;
  for (const Fragment& fragment : fragments_) {
    const bool under_way = &fragment == pushed_;
    most = std::max(most, fragment.samples + (under_way ? pushed_samples_ : 0));
  }
  return most;
}

absl::StatusOr<ConstTensors> AverageFragments::ServersWeights() {
  PS_RETURN_IF_ERROR(Settle());
  return anchors_.Read();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Steps>> MakeAverageFragments(const StepsContext& context) {
  PS_ASSIGN_OR_RETURN(LocalTraining training, LocalTraining::Create(context));
  PS_ASSIGN_OR_RETURN(TensorMemory anchors, training.AllocateCopy());
  PS_ASSIGN_OR_RETURN(TensorMemory differences, training.AllocateCopy());
  return std::make_unique<AverageFragments>(context, std::move(training), std::move(anchors), std::move(differences));
}

}  // namespace ps
