// What the steps of a worker took: for the metrics file, for the log, and in all.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "common/clock.h"
#include "common/metrics.h"
#include "ps/client.h"
#include "worker/model/network.h"

namespace ps {

// A worker's progress: one log line every few seconds.
class Progress {
 public:
  Progress(int64_t first_batch, int64_t total_batches, TimePoint now)
      : began_(now), last_line_(now), first_batch_(first_batch), total_batches_(total_batches) {}

  // After each step; logs "step 1,200 of 4,690, loss 0.412, 34,000 samples/s, 0:12 left" now and then.
  void Step(int64_t batches_done, double loss, int64_t samples, TimePoint now);

 private:
  const TimePoint began_;
  TimePoint last_line_;
  const int64_t first_batch_;
  const int64_t total_batches_;
  int64_t samples_since_line_ = 0;
  double loss_sum_ = 0;  // Since the last line, weighted by samples.
};

// What the steps after the warm-up add up to: their samples, and the seconds in them, in all and by phase.
struct StepTotals {
  int64_t samples = 0;
  double train_s = 0;
  double forward_s = 0;
  double backward_s = 0;
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
  // Pushes that at least one shard refused as STALE, and their samples, which are among the above.
  int64_t dropped_pushes = 0;
  int64_t dropped_samples = 0;

  StepTotals& operator+=(const StepTotals& more);
};

// A batch that was trained on, and the exchange that followed it.
struct StepRecord {
  int64_t batch = 0;  // Its place in the job (BatchSource), from 0.
  uint32_t samples = 0;
  StepResult computed;
  // The worker took an optimizer step by itself, and may do so for several batches from one exchange to the next.
  bool local = false;
  PushInfo push;             // Where nothing was pushed, only the step and the version that the next push will have.
  ExchangeResult exchanged;  // Where nothing was, empty.
  // Seconds that the worker waited for the exchange since its last gradient was ready. The rest was hidden behind
  // computation.
  double exposed_s = 0;
};

class TrainingRecords;  // training_records.h

// Who else is told of each batch, for whoever watches the job.
struct StepReports {
  std::function<void(const StepReport&)> tell;  // Must not wait. Empty: nobody.
  double steps_per_batch = 1;                   // The worker's own, of the batches that are left in the job.
};

// Used by one thread.
class StepStats {
 public:
  // Training begins now with batch `first_batch`; the first `warm_up_steps` batches are left out of the totals.
  // `metrics` must outlive it.
  StepStats(MetricsWriter& metrics, int64_t first_batch, int64_t total_batches, int64_t warm_up_steps, TimePoint now,
            StepReports reports = {})
      : metrics_(metrics),
        warm_up_steps_(warm_up_steps),
        total_batches_(total_batches),
        reports_(std::move(reports)),
        began_(now),
        progress_(first_batch, total_batches, now) {}

  // Writes the batch's `step` line, in which push_s, wait_s and pull_s are what of them was not hidden; logs the
  // progress now and then; adds the batch to the totals; tells who wants reports. The line has `batch` where steps are
  // local, and `answer` where not all shards have applied the push: a word, or one for each shard if they differ.
  void Add(const StepRecord& step, TimePoint now);
  // Adds to train_s what the training loop spent on a batch. It is more than its phases: there are hooks and metrics.
  void AddTime(int64_t batch, double seconds);

  // From now on each batch is recorded there, too, which outlives this.
  void RecordIn(TrainingRecords& records) { records_ = &records; }

  const StepTotals& totals() const { return totals_; }

 private:
  void Report(StepReport report, const StepRecord& step, TimePoint now);

  MetricsWriter& metrics_;
  const int64_t warm_up_steps_;
  const int64_t total_batches_;
  const StepReports reports_;
  const TimePoint began_;
  double reported_s_ = 0;  // Of the time since then, reports have said what became of so much.
  Progress progress_;
  StepTotals totals_;
  TrainingRecords* records_ = nullptr;
};

}  // namespace ps
