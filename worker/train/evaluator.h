// Evaluations of the network, on the way and at the end.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "common/sync.h"
#include "ps/client.h"
#include "worker/data/load.h"
#include "worker/model/device.h"
#include "worker/model/network.h"
#include "worker/train/batches.h"
#include "worker/train/initial_weights.h"

namespace ps {

// When the lead evaluates on the way. Every rank keeps count, so that whoever is the lead next evaluates at the same
// points.
class EvaluationRhythm {
 public:
  // Every `every` epochs of `batches_per_epoch` batches, but not at the end, after `total_batches`: the final
  // evaluation is there. `every` 0: never. A worker that begins after `batches_done` has no part in the evaluations
  // before.
  EvaluationRhythm(double every, int64_t batches_per_epoch, int64_t total_batches, int64_t batches_done);

  // After each batch: whether an evaluation is due. Then the next one is the first that is due later.
  bool Due(int64_t batches_done);

 private:
  double Epochs(int64_t batches_done) const;
  void Pass(int64_t batches_done);

  const double every_;
  const double batches_per_epoch_;
  const int64_t total_batches_;
  double next_ = 0;  // In epochs.
};

// Which weights are evaluated.
struct Mark {
  uint64_t step = 0;     // After so many steps of the worker.
  uint64_t version = 0;  // The weights' version.
  double copied_t = 0;   // When they were copied, in seconds since the process started.
};

// What was found on a split.
struct Evaluation {
  double loss = 0;                 // The mean over its samples, in the units of the targets as read.
  std::optional<double> accuracy;  // In [0, 1]; none for regression.
};

// Is told what was found of the weights of `mark` on a split, for whoever watches the job; must not wait. Called by the
// backend's thread.
using OnEvaluated = std::function<void(const std::string& split, const Mark& mark, const Evaluation& found)>;

// Used by the backend's thread.
class Evaluator {
 public:
  // Samples of a batch, at most; the network must take as many.
  static constexpr int64_t kBatch = 500;

  // Allocates what a batch of the test split, and of the validation split if there is one, takes. Backend, network and
  // metrics must outlive it.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(const DataSplits& data, Backend& backend, Network& network,
                                                           MetricsWriter& metrics, OnEvaluated on_evaluated = {});

  // Does for each split what Batches::KeepSamples does.
  absl::Status KeepSamples();

  // Evaluates the parameters in the network's host memory, which are those of `mark`. Writes an `eval` event, and a
  // line to the log. Nothing, not even an event, comes of a validation split that is empty.
  absl::StatusOr<Evaluation> Test(const Mark& mark);
  absl::StatusOr<Evaluation> Validation(const Mark& mark);

 private:
  Evaluator(Network& network, MetricsWriter& metrics, OnEvaluated on_evaluated, double loss_unit)
      : network_(network), metrics_(metrics), on_evaluated_(std::move(on_evaluated)), loss_unit_(loss_unit) {}
  absl::StatusOr<Evaluation> Evaluate(Batches& split, const std::string& name, const Mark& mark);

  Network& network_;
  MetricsWriter& metrics_;
  const OnEvaluated on_evaluated_;
  const double loss_unit_;
  std::unique_ptr<Batches> test_;
  std::unique_ptr<Batches> validation_;  // Null if there is no validation split.
};

// --keep_best: of the weights that were evaluated, those with the lowest loss on the validation split, the first of
// equal ones. A loss that is no finite number is never the lowest.
struct BestWeights {
  Mark mark;
  Evaluation validation;
  Values weights;
};

// Evaluations of copies of the weights, while training goes on.

// Has a backend, a network and a thread of its own, which gives way to those that train. Its methods are for one
// thread.
class EvaluationThread {
 public:
  // Copies that wait, at most; then the next one waits for room.
  static constexpr size_t kMaxWaiting = 4;

  struct Context {
    const DataSplits& data;
    const ModelOptions& model;
    const DeviceOptions& device;  // Never `auto`.
    uint32_t rank = 0;
    MetricsWriter& metrics;
    // Every copy is evaluated on the validation split, too, and the best one (BestWeights) is what is tested at the
    // end.
    bool keeps_best = false;
    OnEvaluated on_evaluated = {};  // May be empty.
  };

  // What training ends with.
  struct Kept {
    Mark mark;
    Evaluation test;
    // The weights of `mark`; null without keeps_best, or if no validation loss was finite: then `mark` is the last.
    std::shared_ptr<const BestWeights> best;
  };

  // What the context refers to must outlive it. INVALID_ARGUMENT if the test split has no samples, or, with
  // keeps_best, the validation split has none.
  static absl::StatusOr<std::unique_ptr<EvaluationThread>> Create(const Context& context);
  // Copies that wait are dropped, which is logged.
  ~EvaluationThread();
  EvaluationThread(const EvaluationThread&) = delete;
  EvaluationThread& operator=(const EvaluationThread&) = delete;

  // Allocates what evaluating takes, which else the first evaluation does: for a device whose free memory is about to
  // be used otherwise.
  absl::Status SetUp();

  // Copies the weights, to be evaluated on the test split. Waits while kMaxWaiting others do. Errors are those of
  // earlier evaluations; RESOURCE_EXHAUSTED if there is not enough memory.
  absl::Status Add(const ConstTensors& weights, uint64_t step, uint64_t version);
  // The same, on the validation split, and waits for it and all before; then evaluates on the test split what is kept:
  // these weights, or, with keeps_best, the best of all that were added so far.
  absl::StatusOr<Kept> Last(const ConstTensors& weights, uint64_t step, uint64_t version);
  // Waits until all that were added have been evaluated.
  absl::Status Drain();

 private:
  struct Copy {
    Values weights;  // None: there is only to be set up.
    Mark mark;
    bool last = false;
  };

  explicit EvaluationThread(const Context& context) : context_(context) {}
  absl::Status Enqueue(const ConstTensors& weights, const Mark& mark, bool last);
  void Run();
  absl::Status Evaluate(Copy& copy);
  absl::Status Validate(Copy& copy);
  absl::Status TestKept(const Mark& last);
  void Load(const Values& weights);

  const Context context_;
  // These are the thread's, in the order in which they are made.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Evaluator> evaluator_;
  bool keeps_samples_ = false;
  std::shared_ptr<const BestWeights> best_;  // So far; null: none.

  Mutex mutex_;
  CondVar changed_;
  std::deque<Copy> waiting_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // The first error. Nothing is evaluated after it.
  Kept kept_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace ps
