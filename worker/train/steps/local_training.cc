#include "worker/train/steps/local_training.h"

#include <algorithm>
#include <string>

#include "common/clock.h"
#include "common/simd.h"
#include "worker/link/tensor_memory.h"

namespace ps {

void CopyTensors(const ConstTensors& from, const MutableTensors& to) {
  for (size_t tensor = 0; tensor < to.size(); ++tensor) {
    std::copy(from[tensor].begin(), from[tensor].end(), to[tensor].begin());
  }
}

void Difference(float scale, const ConstTensors& a, const ConstTensors& b, const MutableTensors& x) {
  for (size_t tensor = 0; tensor < x.size(); ++tensor) {
    for (size_t i = 0; i < x[tensor].size(); ++i) x[tensor][i] = scale * (a[tensor][i] - b[tensor][i]);
  }
}

void AddDifference(const ConstTensors& a, const ConstTensors& b, const MutableTensors& x) {
  for (size_t tensor = 0; tensor < x.size(); ++tensor) {
    for (size_t i = 0; i < x[tensor].size(); ++i) x[tensor][i] += a[tensor][i] - b[tensor][i];
  }
}

void Subtract(const ConstTensors& a, const MutableTensors& x) {
  for (size_t tensor = 0; tensor < x.size(); ++tensor) {
    for (size_t i = 0; i < x[tensor].size(); ++i) x[tensor][i] -= a[tensor][i];
  }
}

uint32_t TakeSamples(uint64_t& samples) {
  return static_cast<uint32_t>(std::min<uint64_t>(std::exchange(samples, 0), UINT32_MAX));
}

LocalTraining::LocalTraining(const StepsContext& context, std::unique_ptr<Optimizer> optimizer)
    : context_(context),
      optimizer_(std::move(optimizer)),
      weights_(context.network.parameters()),
      gradients_(context.network.gradients()) {
  const LocalSteps& steps = *context.client.policy().local_steps;
  if (steps.clip_value > 0) clip_.value = steps.clip_value;
  if (steps.clip_tensor_norm > 0) clip_.tensor_norm = steps.clip_tensor_norm;
  if (steps.clip_norm > 0) clip_.norm = steps.clip_norm;
}

absl::StatusOr<LocalTraining> LocalTraining::Create(const StepsContext& context) {
  const std::string& name = context.client.policy().local_steps->optimizer;
  if (name == "local") {
    return FailedPrecondition(
        "the servers leave the optimizer to the workers (--optimizer=local), which is for scripts that "
        "bring one; ps_worker has none of its own: start the servers with --optimizer=",
        OptimizerChoices());
  }
  PS_ASSIGN_OR_RETURN(std::unique_ptr<Optimizer> optimizer, MakeOptimizer(name));
  if (context.exchanges.hyperparameters().empty()) {
    return FailedPrecondition("--mode=", context.client.mode(), ": the servers' weights came without hyperparameters");
  }
  LocalTraining training(context, std::move(optimizer));
  training.SetPosition();
  for (int k = 0; k < training.optimizer_->state_tensors(); ++k) {
    PS_ASSIGN_OR_RETURN(TensorMemory state,
                        Annotate(AllocateTensors(context.network.layout()), "the optimizer's state"));
    const float initial = training.optimizer_->InitialState(k, training.CurrentHyperparameters());
    for (const std::span<float> tensor : state.tensors) std::fill(tensor.begin(), tensor.end(), initial);
    training.state_.push_back(std::move(state));
  }
  return training;
}

// The servers tell all that the optimizer uses.
Hyperparameters LocalTraining::CurrentHyperparameters() const {
  return Changed(DefaultHyperparameters(context_.client.policy().local_steps->optimizer),
                 context_.exchanges.hyperparameters());
}

absl::StatusOr<TensorMemory> LocalTraining::AllocateCopy() const {
  return Annotate(AllocateTensors(context_.network.layout()), "a copy of the weights");
}

void LocalTraining::ClipGradients(Isa isa) {
  std::vector<double> squares;
  squares.reserve(gradients_.size());
  for (const std::span<float> gradient : gradients_) {
    if (clip_.value.has_value()) ClipValues(gradient.data(), gradient.size(), *clip_.value, isa);
    if (!clip_.needs_norms()) continue;
    SquareSum sum;
    sum.Add(gradient.data(), gradient.size(), isa);
    squares.push_back(sum.total());
  }
  if (!clip_.needs_norms()) return;
  const std::vector<float> factors = ClipFactors(clip_, squares);
  for (size_t tensor = 0; tensor < gradients_.size(); ++tensor) {
    if (factors[tensor] != 1) Scale(gradients_[tensor].data(), gradients_[tensor].size(), factors[tensor], isa);
  }
}

void LocalTraining::Apply(StepResult& result) {
  static const Isa isa = BestIsa();
  const TimePoint began = Now();
  const FlushSubnormals flush;
  ++updates_;
  Hyperparameters current = CurrentHyperparameters();
  current.learning_rate =
      context_.exchanges.schedule().Scaled(current.learning_rate, position_ + passed_ * context_.client.num_workers());
  ClipGradients(isa);
  for (size_t tensor = 0; tensor < weights_.size(); ++tensor) {
    OptimizerBlock block = {.elements = weights_[tensor].size(),
                            .gradient = gradients_[tensor].data(),
                            .weights = weights_[tensor].data(),
                            .new_weights = weights_[tensor].data()};
    for (size_t k = 0; k < state_.size(); ++k) block.state[k] = block.new_state[k] = state_[k].tensors[tensor].data();
    UpdateContext update = {.update = updates_, .hyperparameters = ForTensor(current, context_.layout[tensor])};
    if (optimizer_->uses_trust_ratio()) update.trust_ratio = TrustRatio(optimizer_->Measure(block, update, isa));
    optimizer_->Apply(block, update, isa);
  }
  result.update_began = began;
  result.update_s = Seconds(Now() - began);
  result.backward_s += result.update_s;
}

void LocalTraining::SetPosition(uint64_t more) {
  position_ = context_.exchanges.position() + more;
  passed_ = 0;
}

StepRecord LocalTraining::Record(const TrainingBatch& batch, const StepResult& computed) const {
  return {.batch = batch.place,
          .samples = batch.samples,
          .computed = computed,
          .local = true,
          .push = {.step = context_.exchanges.step(), .version = context_.exchanges.version()}};
}

absl::Status LocalTraining::EndExchange(StepRecord& record) {
  PS_ASSIGN_OR_RETURN(EndedExchange ended, context_.exchanges.End());
  record.push = std::move(ended.push);
  record.exchanged.version = ended.result.version;
  record.exchanged.versions = std::move(ended.result.versions);
  record.exchanged.answers = std::move(ended.result.answers);
  record.exchanged.push_s += ended.result.push_s;
  record.exchanged.wait_s += ended.result.wait_s;
  record.exchanged.pull_s += ended.result.pull_s;
  record.exposed_s += ended.exposed_s;
  return absl::OkStatus();
}

absl::Status Rounds::Train(const TrainingBatch& batch) {
  StepHooks hooks;
  hooks.before_backward = [this] { return Settle(); };
  PS_ASSIGN_OR_RETURN(StepResult computed, ComputeBatch(context_, batch, hooks));
  PS_RETURN_IF_ERROR(Settle());  // A batch without samples has no backward pass.
  if (batch.samples > 0) training_.Apply(computed);
  PS_RETURN_IF_ERROR(context_.client.CountLocalStep());  // Rounds may be long.
  ++batches_;
  samples_ += batch.samples;
  training_.Passed(batch.samples);
  PS_ASSIGN_OR_RETURN(const NextBatch::Kind next, context_.feed.Peek());
  StepRecord record = training_.Record(batch, computed);
  const ModePolicy& policy = context_.client.policy();
  const bool ends = batches_ >= policy.local_steps->steps || next != NextBatch::Kind::kBatch;
  if (ends) batches_ = 0;
  // Nobody waits for a push without samples, and the weights have not moved.
  if (!ends || (samples_ == 0 && !policy.empty_contributions)) {
    context_.stats.Add(record, Now());
    if (ends) context_.feed.Finished(batch);
  } else {
    uint64_t samples = samples_;
    PS_RETURN_IF_ERROR(EndRound(batch, TakeSamples(samples), std::move(record)));
    samples_ = 0;
  }
  return context_.feed.Prefetch();
}

}  // namespace ps
