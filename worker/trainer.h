// One worker's part of a job: join, loop and end.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/client.h"
#include "worker/batches.h"
#include "worker/data/sampler.h"
#include "worker/evaluator.h"
#include "worker/model/network.h"
#include "worker/options.h"
#include "worker/preparation.h"
#include "worker/step_stats.h"

namespace ps {

// What a worker did, and what the lead (Client::lead) found at the end.
struct TrainingResult {
  uint32_t rank = 0;
  bool lead = false;
  Evaluation test;  // The lead's only, as the next three.
  uint64_t version = 0;
  HashedWeights weights_hash;
  absl::Status end_status;  // What failed after the evaluation: hashing, saving, leaving. What is above holds.

  StepTotals steps;  // Of each rank.
};

// Used by one thread, but for Stop.
class Trainer {
 public:
  explicit Trainer(const WorkerOptions& options) : options_(options) {}

  // Trains from joining to leaving. INVALID_ARGUMENT naming all that is wrong with the options (ValidateWorkerOptions)
  // before anything else is done. Errors name the flag, file, tensor or server. `flags` go into the `start` event.
  absl::StatusOr<TrainingResult> Run(const nlohmann::ordered_json& flags);

  // Makes Run stop waiting, leave the job and return CANCELLED. Thread-safe.
  void Stop() { stop_.request_stop(); }

 private:
  absl::Status JoinJob();
  // Once the rank is known: the backend, the network, the batches.
  absl::Status SetUp();
  absl::Status MakeNetwork();
  absl::Status MakeBatches();
  void WriteStart(const nlohmann::ordered_json& flags);
  absl::Status Start();

  absl::Status Train();
  absl::Status TrainBatch(int64_t batch);
  // Loads the batch, unless it is loaded already or training ends before it.
  absl::Status TakeBatch(int64_t batch);
  void StartExchange(uint32_t samples, bool deferred);
  // Waits until the exchange under way, if any, has brought the tensor.
  absl::Status AwaitWeights(size_t tensor);
  // Waits for the exchange under way, if any, and records its step.
  absl::Status EndExchange();
  absl::Status EvaluateOnTheWay();
  absl::Status Pull();

  absl::Status Finish();
  // Saves and hashes the weights, each whether or not the other fails.
  absl::Status Keep();
  // Leaves the job; the result if all went well.
  absl::StatusOr<TrainingResult> End(const absl::Status& status);

  const WorkerOptions options_;
  std::stop_source stop_;
  // What was ready before joining. The initial values stay until the job runs; random ones are made only after the job
  // has accepted the model, which then fits into memory.
  Preparation prepared_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Batches> train_batches_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Evaluator> evaluator_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Sampler> sampler_;
  std::optional<StepStats> stats_;  // From the first batch on.
  ConstTensors gradients_;
  MutableTensors weights_;

  int64_t total_batches_ = 0;
  uint64_t step_ = 0;               // Of the next push.
  uint64_t version_ = 0;            // Of the weights; the lowest over the shards.
  std::vector<uint64_t> versions_;  // By shard.
  int64_t taken_ = -1;              // The batch that is in batch_.
  double taking_s_ = 0;             // What taking it took; a part of its step's forward pass.
  BatchPlan plan_;
  Batch batch_;

  // The step whose exchange is under way. In a synchronous mode it goes on into the next step's forward pass.
  std::shared_ptr<Exchange> exchange_;
  StepRecord pending_;
  TrainingResult result_;  // What there is of it so far.
};

}  // namespace ps
