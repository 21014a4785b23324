// Evaluations of the network, on the way and at the end.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "worker/batches.h"
#include "worker/data/load.h"
#include "worker/model/network.h"

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
  uint64_t version = 0;  // Of the weights.
  double copied_t = 0;   // When they were copied, in seconds since the process started.
};

// What was found on a split.
struct Evaluation {
  double loss = 0;                 // The mean over its samples, in the units of the targets as read.
  std::optional<double> accuracy;  // In [0, 1]; none for regression.
};

// Used by the backend's thread.
class Evaluator {
 public:
  // Samples of a batch, at most; the network must take as many.
  static constexpr int64_t kBatch = 500;

  // Allocates what a batch of the test split, and of the validation split if there is one, takes. Backend, network and
  // metrics must outlive it.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(const DataSplits& data, Backend& backend, Network& network,
                                                           MetricsWriter& metrics);

  // As Batches::KeepSamples, for each split.
  absl::Status KeepSamples();

  // Evaluates the parameters in the network's host memory, which are those of `mark`. Writes an `eval` event, and a
  // line to the log. Nothing, not even an event, comes of a validation split that is empty.
  absl::StatusOr<Evaluation> Test(const Mark& mark);
  absl::StatusOr<Evaluation> Validation(const Mark& mark);

 private:
  Evaluator(Network& network, MetricsWriter& metrics, double loss_unit)
      : network_(network), metrics_(metrics), loss_unit_(loss_unit) {}
  absl::StatusOr<LossSums> Sum(Batches& split);
  absl::StatusOr<Evaluation> Evaluate(Batches& split, const std::string& name, const Mark& mark);

  Network& network_;
  MetricsWriter& metrics_;
  const double loss_unit_;
  std::unique_ptr<Batches> test_;
  std::unique_ptr<Batches> validation_;  // Null if there is no validation split.
};

}  // namespace ps
