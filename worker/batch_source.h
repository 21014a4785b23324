// Which samples a worker trains on next, until its budget is spent.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "worker/data/sampler.h"

namespace ps {

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

  // Of a job that hands out runs: so many of this worker's are among the batches that were taken; else 0.
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

}  // namespace ps
