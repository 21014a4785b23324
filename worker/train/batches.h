// A data set's samples, brought to where the network computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/client.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"
#include "worker/model/backend.h"
#include "worker/model/network.h"

namespace ps {

// Used by the backend's thread; the backend must outlive it.
class Batches {
 public:
  // max_batch ≥ 1: the largest that is loaded.
  static absl::StatusOr<std::unique_ptr<Batches>> Create(const Dataset& dataset, Backend& backend, int64_t max_batch);
  // Waits for what is under way.
  ~Batches() { (void)backend_.Synchronize(); }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Call it once, after all other device memory is allocated. If the samples fit into the free memory, minus a reserve,
  // they are kept there as they are stored, and gathered by the device; else each batch is gathered by the host, which
  // the log says.
  absl::Status KeepSamples();

  const Dataset& dataset() const { return dataset_; }
  // The device has the samples.
  bool resident() const { return bytes_ != nullptr || floats_ != nullptr; }

  // Queues the samples `indices`, each in [0, dataset().size()), to the memory of the previous batch, whose step must
  // have ended.
  absl::StatusOr<Batch> Load(std::span<const int32_t> indices);

 private:
  Batches(const Dataset& dataset, Backend& backend, int64_t max_batch)
      : dataset_(dataset), backend_(backend), max_batch_(max_batch) {}
  bool regression() const { return dataset_.classes() == 0; }
  absl::Status Allocate(int64_t bytes, Memory& device, Memory* host);
  absl::Status GatherOnDevice(std::span<const int32_t> indices);
  absl::Status GatherOnHost(std::span<const int32_t> indices);

  const Dataset dataset_;
  Backend& backend_;
  const int64_t max_batch_;
  Memory x_;
  Memory labels_;  // For regression the targets, here and below: both have four bytes a sample.
  Memory indices_;
  // The host's: the same as the above where memory is unified, null where they are not needed.
  Memory host_x_;
  Memory host_labels_;
  Memory host_indices_;
  // What the device has of the samples; the data set's own memory where memory is unified.
  Memory kept_samples_;
  Memory kept_labels_;
  const uint8_t* bytes_ = nullptr;
  const float* floats_ = nullptr;
  const void* all_labels_ = nullptr;
};

// Which samples a worker trains on next, until its budget is spent.

// What comes next.
struct NextBatch {
  enum class Kind {
    kBatch,   // `plan`.
    kNotYet,  // There may be another one, but it would have to be waited for.
    kSpent,   // There is none: the budget is spent.
  };
  Kind kind = Kind::kSpent;
  BatchPlan plan;
};

// Used by one thread.
class BatchSource {
 public:
  virtual ~BatchSource() = default;

  // The next batch. It never comes again, so it must be trained on, or be dropped (SkipTo). With `wait` it is never
  // kNotYet, and the wait, which is on others, ends as those of Client do. Before a wait all earlier batches must be
  // Finished, or several workers may wait for each other. Errors are those of asking for a batch.
  virtual absl::StatusOr<NextBatch> Take(bool wait) = 0;

  // The first `batches` that were taken are used: the pushes that they went into are answered, whatever the answer. A
  // batch that nothing is pushed for counts as used when the worker has passed it.
  virtual void Finished(int64_t batches) = 0;

  // How many of this worker's runs are among the batches that were taken, in a job that hands out runs; else 0.
  virtual uint64_t taken_runs() const { return 0; }

  // The job has gone on to `step` without this worker (a push was STALE and named the step to continue at). Where each
  // step has its batch, that of this step is next, even if one was taken that was not trained on yet: the caller drops
  // that one. Returns how many samples the batches have that are jumped over and were not taken; nullopt where steps
  // have no batches of their own: nothing has changed.
  virtual std::optional<int64_t> SkipTo(int64_t step) = 0;

  // Samples of a batch, but for an epoch's last.
  virtual int64_t batch_size() const = 0;

  // A plan's place in the job is epoch · batches_per_epoch() + epoch_step, from 0 and below total_batches(). Progress
  // and evaluations go by it. It grows from one batch to the next, but for batches that come late.
  virtual int64_t batches_per_epoch() const = 0;
  virtual int64_t total_batches() const = 0;
  // The batches of this worker in an epoch: on the average, where ranks differ.
  virtual double own_batches_per_epoch() const = 0;

  int64_t PlaceOf(const BatchPlan& plan) const { return plan.epoch * batches_per_epoch() + plan.epoch_step; }
};

// Batches of a budget of `steps`, or, if that is 0, of `epochs`; at least 1.
int64_t BudgetOf(int64_t steps, double epochs, int64_t batches_per_epoch);

// A fixed share for each rank: the sampler's batches from `first` on, below `total`. Its place is a batch's number, and
// a step that is skipped to is one. Never waits.
std::unique_ptr<BatchSource> MakeFixedShare(Sampler sampler, int64_t first, int64_t total);

// The batches of a job whose chief hands out runs of samples (--budget=job): each is taken when the worker is ready for
// it, until the whole job's are used. A batch is a run of batch_size samples of an epoch's permutation; `full` (0) is
// one worker's part of the samples.
struct HandedOutRunsOptions {
  SamplerOptions sampler;  // Any rank's.
  // The whole job's: `epochs` of runs, or as many for each worker as `steps`, if that is not 0.
  double epochs = 1;
  int64_t steps = 0;
  // Others need a contribution of this worker to every step, if only an empty one: while it has to wait for a run it
  // gets batches without samples.
  bool fills_steps = false;
  // Client::TakeRun.
  std::function<absl::StatusOr<TakenRun>(const RunRequest&)> take_run;
};
// The place of a batch is its run's number; that of one without samples is the last run's. It skips to no step.
// INVALID_ARGUMENT as of Sampler::Create.
absl::StatusOr<std::unique_ptr<BatchSource>> MakeHandedOutRuns(const HandedOutRunsOptions& options);

// A batch that is where the network computes.
struct TrainingBatch {
  Batch data;
  uint32_t samples = 0;
  int64_t place = 0;     // In the job (BatchSource).
  int64_t taken = 0;     // Batches that the worker has taken, this one included.
  uint64_t runs = 0;     // The meaning is that of PushInfo::runs, with this batch.
  double loading_s = 0;  // What taking and loading it took.
};

// Used by the backend's thread. Source and batches must outlive it.
class BatchFeed {
 public:
  BatchFeed(BatchSource& source, Batches& batches) : source_(source), batches_(batches) {}

  // Whether a batch follows the present one, without waiting for it.
  absl::StatusOr<NextBatch::Kind> Peek();
  // Loads the batch that follows, if there is one. The present one's step has ended: its memory is used again.
  absl::Status Prefetch();
  // Makes the batch that follows the present one, and waits for it where Peek says kNotYet; nothing when the budget is
  // spent.
  absl::StatusOr<std::optional<TrainingBatch>> Next();

  // The push that this batch went into is answered, and so are those of all before it; or nothing was pushed for it.
  void Finished(const TrainingBatch& batch) { source_.Finished(batch.taken); }
  // The job has gone on to this step without the worker.
  void SkipTo(uint64_t step);
  // The samples of batches that it has jumped over since the last call. They count as passed: schedules go by it.
  int64_t TakeJumpedOver() { return std::exchange(jumped_over_, 0); }

  // The place of the batch that follows, after Peek; where there is none, of the budget's end.
  int64_t next_place() const;

  const BatchSource& source() const { return source_; }

 private:
  absl::Status Take(bool wait);
  absl::Status Load();

  BatchSource& source_;
  Batches& batches_;
  std::optional<NextBatch> next_;  // Taken, or known not to be there; unset: not asked for.
  TrainingBatch loaded_;           // The batch that `next_` names, if is_loaded_.
  bool is_loaded_ = false;
  int64_t taken_ = 0;
  double loading_s_ = 0;  // What taking and loading `next_` took.
  int64_t jumped_over_ = 0;
};

}  // namespace ps
