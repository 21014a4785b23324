// What the ways to take optimizer steps of one's own have in common: the optimizer, and copies of weights.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clipping.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "ps/client.h"
#include "worker/train/steps/steps.h"

namespace ps {

// Element by element, tensor by tensor.
void CopyTensors(const ConstTensors& from, const MutableTensors& to);
// x ← scale · (a − b)
void Difference(float scale, const ConstTensors& a, const ConstTensors& b, const MutableTensors& x);
// x ← x + (a − b)
void AddDifference(const ConstTensors& a, const ConstTensors& b, const MutableTensors& x);
// x ← x − a
void Subtract(const ConstTensors& a, const MutableTensors& x);

// What a push says of so many samples, which are then 0: at most what its field holds.
uint32_t TakeSamples(uint64_t& samples);

// A worker's own weights x, and what trains them. Used by the backend's thread.
class LocalTraining {
 public:
  // The optimizer is the one that the client's policy names. Its hyperparameters are those that came with the servers'
  // weights last. Errors as of MakeSteps.
  static absl::StatusOr<LocalTraining> Create(const StepsContext& context);

  // One step of the optimizer: x from x and gradients(), which are clipped as the policy says, at the schedule's
  // position after the batches before. The time is added to the backward pass.
  void Apply(StepResult& result);
  // A batch has been used, whether it had samples or not, and whatever was made of its gradient. Nobody tells how far
  // the others have come meanwhile; they are taken to be as fast.
  void Passed(uint32_t samples) { passed_ += samples; }
  // Weights have come from the servers: from their position, and `more`, it is counted on.
  void SetPosition(uint64_t more = 0);

  const MutableTensors& weights() const { return weights_; }      // x
  const MutableTensors& gradients() const { return gradients_; }  // Also the memory for other things to push.

  // Memory for one more copy of the weights. RESOURCE_EXHAUSTED, naming it and the tensor.
  absl::StatusOr<TensorMemory> AllocateCopy() const;
  // What the metrics say of a batch that no exchange has followed yet.
  StepRecord Record(const TrainingBatch& batch, const StepResult& computed) const;
  // Ends the exchange under way, and adds it to the record.
  absl::Status EndExchange(StepRecord& record);

 private:
  LocalTraining(const StepsContext& context, std::unique_ptr<Optimizer> optimizer);
  void ClipGradients(Isa isa);
  // Those that came with the servers' weights last.
  Hyperparameters CurrentHyperparameters() const;

  StepsContext context_;
  std::unique_ptr<Optimizer> optimizer_;
  ClipOptions clip_;
  MutableTensors weights_;
  MutableTensors gradients_;
  std::vector<TensorMemory> state_;  // By state tensor of the optimizer.
  uint64_t updates_ = 0;
  uint64_t position_ = 0;  // The schedule's position when weights came last,
  uint64_t passed_ = 0;    // and the samples that this worker has used since.
};

// Trains in rounds of `steps` batches, each of which ends with an exchange; the last round may be shorter.
class Rounds : public Steps {
 public:
  Rounds(const StepsContext& context, LocalTraining training, TensorMemory servers)
      : context_(context), training_(std::move(training)), servers_(std::move(servers)) {}

  absl::Status Train(const TrainingBatch& batch) final;
  bool at_exchange() const final { return batches_ == 0; }
  uint64_t open_samples() const final { return samples_; }

 protected:
  // A round of so many samples has ended with this batch; 0 only where the mode has empty contributions.
  virtual absl::Status EndRound(const TrainingBatch& batch, uint32_t samples, StepRecord record) = 0;

  StepsContext context_;
  LocalTraining training_;
  const TensorMemory servers_;  // The servers' weights as they came last.

 private:
  uint32_t batches_ = 0;  // In the round so far.
  uint64_t samples_ = 0;  // In the round so far, and until it has ended.
};

template <typename Kind>
absl::StatusOr<std::unique_ptr<Steps>> MakeRounds(const StepsContext& context) {
  PS_ASSIGN_OR_RETURN(LocalTraining training, LocalTraining::Create(context));
  PS_ASSIGN_OR_RETURN(TensorMemory servers, training.AllocateCopy());
  return std::make_unique<Kind>(context, std::move(training), std::move(servers));
}

}  // namespace ps
