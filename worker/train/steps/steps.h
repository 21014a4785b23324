// What a worker makes of its batches: gradients for the servers, or optimizer steps of its own between two exchanges.
// Each way is a file of its own, which the mode's policy (Client::policy) chooses.
//
// All use the network's memory on the host: its parameters are the weights that the worker computes on, its gradients
// are what it pushes, also where that is a difference of weights. A network that rounds is MakePushGradients' alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "worker/model/network.h"
#include "worker/train/batches.h"
#include "worker/train/pace.h"
#include "worker/train/step_stats.h"
#include "worker/train/steps/exchanges.h"

namespace ps {

// The step and the batch that it is trained on from which a fixed share counts all others. They are the first step and
// the first batch, unless the job was restored with another number of workers.
struct ShareOrigin {
  uint64_t step = 0;
  int64_t batch = 0;
};
// The origin where an epoch has so many samples and batches.
ShareOrigin OriginOf(const Client::Resized& resized, int64_t epoch_samples, int64_t batches_per_epoch);

inline ConstTensors Read(const MutableTensors& tensors) { return {tensors.begin(), tensors.end()}; }

// What steps work with. All of it must outlive them.
struct StepsContext {
  Client& client;
  Exchanges& exchanges;
  Network& network;
  BatchFeed& feed;
  StepStats& stats;
  const Layout& layout;         // The network's, with the tensors' factors.
  double loss_unit = 1;         // A loss times this is one of the targets as they were read.
  bool overlap = true;          // Gradients are sent, and weights come, while others are being computed.
  Pace* pace = nullptr;         // None: the worker never idles.
  uint32_t delayed_pushes = 0;  // MakeDelayedGradients.
  ShareOrigin origin = {};
};

// The loss of a batch at the network's parameters, in the targets' units, and its gradients, in the network's memory.
// The forward pass includes loading the batch. Where the worker has a pace, it idles afterwards.
absl::StatusOr<StepResult> ComputeBatch(const StepsContext& context, const TrainingBatch& batch,
                                        const StepHooks& hooks);

// What the metrics say of a batch whose gradient was pushed by this exchange.
StepRecord PushedRecord(const TrainingBatch& batch, const StepResult& computed, EndedExchange exchanged);

// Used by the backend's thread.
class Steps {
 public:
  virtual ~Steps() = default;

  // Trains on the present batch of the feed, and loads the next. An exchange may be under way when it returns. Errors
  // are those of the backend, the batch source and the exchanges.
  virtual absl::Status Train(const TrainingBatch& batch) = 0;

  // Waits for the exchange that is under way, if there is one. To be called when no batch follows, or none yet: by then
  // what was trained is exchanged.
  virtual absl::Status Settle() = 0;

  // The budget is spent, and no batch is left: makes the pushes that the others of the job still wait for.
  virtual absl::Status Conclude() { return absl::OkStatus(); }

  // After Train: whether the batch ended with an exchange, so that an evaluation may follow. It may be under way.
  virtual bool at_exchange() const = 0;

  // The samples of batches that no exchange has been answered for: if the job goes back, or the rank has another owner,
  // what was made of them is lost.
  virtual uint64_t open_samples() const { return 0; }

  // Where the servers' weights are, until the next call: as they came with the last exchange, which it settles, or, of
  // kElastic, the newest. They are of the exchanges' version, or, in fragments, each of the one that came with it. What
  // the worker trains is left as it is.
  virtual absl::StatusOr<ConstTensors> ServersWeights() = 0;
};

// Each batch gives a gradient, which is pushed, and the next one is computed on the weights that come back.
std::unique_ptr<Steps> MakePushGradients(const StepsContext& context);
// An experiment: the same, but a gradient is pushed when `delayed_pushes` later ones have been computed, so that its
// staleness is exactly that, where no other worker pushes; the first ones', for which there are not as many versions
// yet, is 0, 1, 2 and so on. RESOURCE_EXHAUSTED, naming the tensor, if there is not enough memory for as many
// gradients.
absl::StatusOr<std::unique_ptr<Steps>> MakeDelayedGradients(const StepsContext& context);
// LocalSteps::Exchange::kAverageWeights, kAverageGradients and kElastic. The weights, which are the servers' now, are
// where the worker begins. RESOURCE_EXHAUSTED, naming the tensor, if there is not enough memory for the copies of
// weights and the optimizer's state; INVALID_ARGUMENT if the optimizer is unknown to this worker.
absl::StatusOr<std::unique_ptr<Steps>> MakeAverageWeights(const StepsContext& context);
// The same, in fragments, or with an overlap or a mix (LocalSteps).
absl::StatusOr<std::unique_ptr<Steps>> MakeAverageFragments(const StepsContext& context);
absl::StatusOr<std::unique_ptr<Steps>> MakeAverageGradients(const StepsContext& context);
absl::StatusOr<std::unique_ptr<Steps>> MakeElastic(const StepsContext& context);

// Whether MakeSteps makes MakePushGradients.
bool PushesGradients(const ModePolicy& policy, uint32_t delayed_pushes);
// What the client's policy, or an experiment, asks for.
absl::StatusOr<std::unique_ptr<Steps>> MakeSteps(const StepsContext& context);

// What is exchanged after which batch while gradients are averaged (LocalSteps::Exchange::kAverageGradients). Pure.
class Averaging {
 public:
  enum class What { kNothing, kGradients, kWeights };

  // Epochs have so many batches of each worker.
  Averaging(const LocalSteps& local, double batches_per_epoch);

  // After the batch of this number, from 1; a batch after which both are due averages weights. After the last batch,
  // weights are averaged whatever this says.
  What After(int64_t number) const;

 private:
  // Averagings of weights that are due after so many batches.
  int64_t Averagings(int64_t batches) const;

  const int64_t gradients_every_;  // 0: never.
  const double weights_every_;     // Batches.
};

// The batch, of a fixed share, that a worker begins with which joins at `start_step`. `samples_of`: how many samples a
// batch has; where the mode has no empty contributions, what has none made no step. Empty: all have some.
int64_t FirstBatch(const ModePolicy& policy, uint64_t start_step, int64_t batches_per_epoch, int64_t total_batches,
                   const std::function<int64_t(int64_t batch)>& samples_of = {}, const ShareOrigin& origin = {});

}  // namespace ps
