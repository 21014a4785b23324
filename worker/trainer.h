// One worker's part of a job, from joining to leaving.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "ps/client.h"
#include "worker/batches.h"
#include "worker/data/sampler.h"
#include "worker/initial_weights.h"
#include "worker/model/network.h"
#include "worker/options.h"
#include "worker/progress.h"

namespace ps {

// What a worker did, and what the lead (Client::lead) found at the end.
struct TrainingResult {
  uint32_t rank = 0;
  bool lead = false;
  double test_loss = 0;                 // The lead's only, as the next four.
  std::optional<double> test_accuracy;  // In [0, 1]; none for regression.
  uint64_t version = 0;
  HashedWeights weights_hash;
  absl::Status end_status;  // What failed after the evaluation: hashing, saving, leaving. What is above holds.

  // Of each rank: its samples, and the seconds in its steps, in all and by phase.
  int64_t samples = 0;
  double train_s = 0;
  double forward_s = 0;
  double backward_s = 0;
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// Used by one thread, but for Stop.
class Trainer {
 public:
  explicit Trainer(const WorkerOptions& options) : options_(options) {}

  // Trains from joining to leaving. Errors name the flag, file, tensor or server. `flags` go into the `start` event.
  absl::StatusOr<TrainingResult> Run(const nlohmann::ordered_json& flags);

  // Makes Run stop waiting, leave the job and return CANCELLED. Thread-safe.
  void Stop() { stop_.request_stop(); }

 private:
  absl::Status Prepare();
  absl::Status FitModelToData();
  absl::Status JoinJob();
  // Once the rank is known: sets up the backend, the network and the batches.
  absl::Status SetUp();
  absl::Status Start();
  void WriteStart(const nlohmann::ordered_json& flags);
  std::map<std::string, std::string> Experiment() const;
  absl::Status MakeBatches();
  absl::Status Train();
  absl::Status TrainBatch(int64_t batch);
  void StartExchange(uint32_t samples, bool deferred);
  absl::Status AwaitWeights(int layer);
  // The exchange under way, if any: waits for it and records its step.
  absl::Status EndExchange();
  bool EvaluationDue(int64_t batches_done);
  double Epochs(int64_t batches_done) const;
  // The next evaluation is the first that is due after so many batches.
  void PassEvaluations(int64_t batches_done);
  absl::Status TakeBatch(int64_t batch);
  absl::Status EvaluateNow();
  absl::StatusOr<LossSums> Evaluate(Batches& batches, const std::string& split);
  absl::Status Finish();
  absl::Status Keep();
  absl::Status Save() const;

  const WorkerOptions options_;
  std::stop_source stop_;
  std::unique_ptr<MetricsWriter> metrics_;
  DataSplits data_;
  DeviceOptions device_;  // As found.
  // Initial values by tensor, until the job runs. Those of --init_weights are read before joining; random ones are made
  // only after the job has accepted the model, which then fits into memory.
  Values initial_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Batches> train_batches_;
  std::unique_ptr<Batches> test_batches_;
  std::unique_ptr<Batches> validation_batches_;  // Null if there is no validation split.
  std::unique_ptr<Network> network_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<Progress> progress_;
  ConstTensors gradients_;
  MutableTensors weights_;

  int64_t total_batches_ = 0;
  uint64_t step_ = 0;               // Of the next push.
  uint64_t version_ = 0;            // Of the weights; the lowest over the shards.
  std::vector<uint64_t> versions_;  // By shard.
  int64_t taken_ = -1;              // The batch that is in batch_.
  double prepared_s_ = 0;           // What taking it took; a part of its step's forward pass.
  BatchPlan plan_;
  Batch batch_;

  // The step whose exchange is under way. In a synchronous mode it goes on into the next step's forward pass.
  struct Pending {
    std::shared_ptr<Exchange> exchange;
    PushInfo push;
    int64_t batch = 0;
    StepResult computed;
    double exposed_s = 0;  // Since the last gradient was ready, without what was computed meanwhile.
  };
  Pending pending_;
  TrainingResult result_;  // What there is of it so far.
  double next_eval_ = 0;   // In epochs.
};

}  // namespace ps
