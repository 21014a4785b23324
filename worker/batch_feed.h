// The batch that a worker trains on and the one after it, which is loaded while servers are at work.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/batch_source.h"
#include "worker/batches.h"

namespace ps {

// A batch that is where the network computes.
struct TrainingBatch {
  Batch data;
  uint32_t samples = 0;
  int64_t place = 0;     // In the job (BatchSource).
  int64_t taken = 0;     // Batches that the worker has taken, this one included.
  uint64_t runs = 0;     // As PushInfo: with this batch.
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
  TrainingBatch loaded_;           // Of `next_`, if is_loaded_.
  bool is_loaded_ = false;
  int64_t taken_ = 0;
  double loading_s_ = 0;  // Of `next_`.
  int64_t jumped_over_ = 0;
};

}  // namespace ps
