// One worker's part of a job: join, loop and end.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/sync.h"
#include "ps/client.h"
#include "worker/model/network.h"
#include "worker/train/batches.h"
#include "worker/train/evaluator.h"
#include "worker/train/options.h"
#include "worker/train/preparation.h"
#include "worker/train/step_stats.h"
#include "worker/train/steps/exchanges.h"
#include "worker/train/steps/steps.h"

namespace ps {

// What a worker did, and what the lead (Client::lead) found at the end.
struct TrainingResult {
  uint32_t rank = 0;
  bool lead = false;
  Evaluation test;            // The lead's only, as the next five.
  uint64_t version = 0;       // That was tested and saved: the last, or with --keep_best the best.
  uint64_t last_version = 0;  // The servers' last version, which the hash is of.
  // With --keep_best, of that version; unset: no validation loss was finite, and the last one is kept.
  std::optional<Evaluation> validation;
  HashedWeights weights_hash;
  bool left_early = false;  // In order, since it was asked to: what the lead finds is not there.
  absl::Status end_status;  // What failed after the evaluation: hashing, saving, leaving. What is above holds.

  StepTotals steps;  // Every rank has them.
};

// Used by one thread, but for Stop.
class Trainer {
 public:
  explicit Trainer(const WorkerOptions& options) : options_(options) {}
  ~Trainer() { TellNobody(); }

  // Trains from joining to leaving. INVALID_ARGUMENT naming all that is wrong with the options (ValidateWorkerOptions)
  // before anything else is done. Errors name the flag, file, tensor or server. `flags` go into the `start` event.
  absl::StatusOr<TrainingResult> Run(const nlohmann::ordered_json& flags);

  // Makes Run stop waiting, leave the job and return CANCELLED. Thread-safe.
  void Stop() { stop_.request_stop(); }
  // Makes Run end the step that it is at, leave the job and return a result that says so (left_early). Where it does
  // not train, but waits for others, it leaves at once; where its step waits for others, after 10 s. For one thread.
  void LeaveInOrder();

 private:
  absl::Status JoinJob(const ClientOptions& options);
  // Evaluations are told to the present client, until TellNobody. Thread-safe.
  void TellEvaluation(const std::string& split, const Mark& mark, const Evaluation& found);
  void TellNobody();
  // From the join, until the worker has left, or its generation of the job is over.
  absl::Status TrainGeneration(const nlohmann::ordered_json& flags);
  bool ComesBack(const absl::Status& status) const;
  bool IsOver(const absl::Status& status) const;
  // `why`: how the last client ended.
  absl::Status JoinAgain(const absl::Status& why);
  // Adds the totals of the generation's steps to the result.
  void AddTotals();
  // With --data=own: prepares this worker's samples by what all workers have.
  absl::Status TakeDataOfAll();
  // Makes what depends on the rank and the client: the backend, the network, the batches.
  absl::Status SetUp();
  SamplerOptions SamplerOf() const;
  absl::Status MakeSourceOfRuns();
  absl::Status MakeSourceOfShare();
  absl::StatusOr<NetworkMemory> MemoryOfClient();
  absl::Status MakeBatches();
  void WriteStart(const nlohmann::ordered_json& flags);
  absl::Status Start();
  void TellJoinedAgain();

  absl::Status Train();
  // Each batch is told to the client, for whoever watches the job.
  StepReports Reports() const;
  absl::StatusOr<std::optional<TrainingBatch>> NextTrainingBatch();
  // One batch, and a copy of the weights where an evaluation is due.
  absl::Status TrainBatch(const TrainingBatch& batch, EvaluationRhythm& rhythm);

  absl::Status Finish();
  // Saves these weights and hashes the servers', each whether or not the other fails.
  absl::Status Keep(const ConstTensors& weights);
  absl::Status Leave();
  // Leaves the job, if that was not done; the result if all went well.
  absl::StatusOr<TrainingResult> End(const absl::Status& status);

  const WorkerOptions options_;
  std::stop_source stop_;
  // What was ready before joining. The initial values stay until the job runs, or where it can be rolled back to its
  // beginning; random ones are made only after the job has accepted the model, which then fits into memory.
  Preparation prepared_;
  ClientOptions client_options_;  // The options of the first join.
  std::optional<DataSummary> data_of_all_;
  bool told_start_ = false;  // In the metrics.
  // How the client before this one ended, if there was one.
  enum class Ending { kNone, kRolledBack, kFenced };
  Ending ended_before_ = Ending::kNone;
  std::atomic<bool> leaves_in_order_ = false;
  bool left_ = false;                    // It had no more to do when the job was rolled back.
  std::atomic<bool> training_ = false;   // It makes steps.
  std::atomic<bool> concludes_ = false;  // It is the lead, and all are done.
  Waiting waiting_;                      // For servers, while it makes steps.
  std::jthread leave_by_;                // Ends the wait for a step that does not end.
  uint64_t last_step_ = 0;               // The last step of a generation that is over.
  uint64_t dropped_samples_ = 0;         // Those whose round was open when the client before ended.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Batches> train_batches_;
  std::unique_ptr<Network> network_;
  Mutex told_mutex_;
  Client* told_ ABSL_GUARDED_BY(told_mutex_) = nullptr;  // The client that evaluations are told to.
  std::unique_ptr<EvaluationThread> evaluation_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<BatchSource> source_;
  std::unique_ptr<BatchFeed> feed_;
  std::optional<StepStats> stats_;  // From the first batch on, and the next two.
  std::optional<Exchanges> exchanges_;
  ShareOrigin origin_;
  std::optional<Pace> pace_;
  std::unique_ptr<Steps> steps_;
  MutableTensors weights_;
  bool evaluation_due_ = false;  // At the next exchange.
  TrainingResult result_;        // What there is of it so far.
};

}  // namespace ps
