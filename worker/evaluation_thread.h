// Evaluations of copies of the weights, while training goes on.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/sync.h"
#include "ps/client.h"
#include "worker/best_weights.h"
#include "worker/evaluator.h"
#include "worker/model/device.h"

namespace ps {

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
    // Every copy is evaluated on the validation split, too, and the best one (KeepBest) is what is tested at the end.
    bool keeps_best = false;
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
  absl::Status MakeReady();
  absl::Status Evaluate(Copy& copy);
  absl::Status Validate(Copy& copy);
  absl::Status TestKept(const Mark& last);
  void Load(const Values& weights);

  const Context context_;
  // Of the thread. In the order in which they are made.
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
