#include <algorithm>
#include <deque>
#include <utility>

#include "common/status.h"
#include "worker/train/batches.h"

namespace ps {
namespace {

// Others wait for the contribution of a worker that has no run; but most often the last run is about to be finished.
constexpr absl::Duration kFillingWait = absl::Milliseconds(20);

class HandedOutRuns final : public BatchSource {
 public:
  HandedOutRuns(HandedOutRunsOptions options, Sampler sampler)
      : options_(std::move(options)),
        sampler_(std::move(sampler)),
        workers_(options_.sampler.num_workers),
        total_(BudgetOf(std::min(options_.steps, INT64_MAX / workers_) * workers_, options_.epochs,
                        sampler_.steps_per_epoch())) {}

  absl::StatusOr<NextBatch> Take(bool wait) override {
    PS_ASSIGN_OR_RETURN(const TakenRun taken, options_.take_run(Request(wait)));
    switch (taken.outcome) {
      case TakenRun::Outcome::kDone:
        return NextBatch{.kind = NextBatch::Kind::kSpent};
      case TakenRun::Outcome::kWait:
        if (!wait) return NextBatch{.kind = NextBatch::Kind::kNotYet};
        if (options_.fills_steps) return Batch(/*is_run=*/false);
        return Internal("waiting for a run of samples while ", taken_runs_ - finished_runs_,
                        " of this worker's are not finished");
      case TakenRun::Outcome::kRun:
        break;
    }
    // On the wire it is anything.
    if (taken.run >= static_cast<uint64_t>(total_)) {
      return Internal("the chief handed out run ", taken.run, " of ", total_);
    }
    ++taken_runs_;
    last_run_ = static_cast<int64_t>(taken.run);
    return Batch(/*is_run=*/true);
  }

  void Finished(int64_t batches) override {
    for (; finished_batches_ < batches && !open_.empty(); ++finished_batches_) {
      if (open_.front()) ++finished_runs_;
      open_.pop_front();
    }
  }
  std::optional<int64_t> SkipTo(int64_t /*step*/) override { return std::nullopt; }
  uint64_t taken_runs() const override { return taken_runs_; }
  int64_t batch_size() const override { return sampler_.batch_size(); }
  int64_t batches_per_epoch() const override { return sampler_.steps_per_epoch(); }
  int64_t total_batches() const override { return total_; }
  double own_batches_per_epoch() const override {
    return static_cast<double>(batches_per_epoch()) / static_cast<double>(workers_);
  }

 private:
  RunRequest Request(bool wait) const {
    return {.number = taken_runs_ + 1,
            .finished = finished_runs_,
            .samples = static_cast<uint64_t>(options_.sampler.samples),
            .batch_size = static_cast<uint64_t>(sampler_.batch_size()),
            .runs = static_cast<uint64_t>(total_),
            .wait = !wait                  ? absl::ZeroDuration()
                    : options_.fills_steps ? kFillingWait
                                           : absl::InfiniteDuration()};
  }

  NextBatch Batch(bool is_run) {
    open_.push_back(is_run);
    NextBatch next = {.kind = NextBatch::Kind::kBatch, .plan = sampler_.Batch(last_run_)};
    if (!is_run) next.plan.indices.clear();
    return next;
  }

  const HandedOutRunsOptions options_;
  Sampler sampler_;  // A single worker's sampler: its steps are the runs.
  const int64_t workers_;
  const int64_t total_;
  int64_t last_run_ = 0;
  uint64_t taken_runs_ = 0;
  uint64_t finished_runs_ = 0;
  int64_t finished_batches_ = 0;
  std::deque<bool> open_;  // For each batch that was taken and is not finished: whether it is a run.
};

}  // namespace

absl::StatusOr<std::unique_ptr<BatchSource>> MakeHandedOutRuns(const HandedOutRunsOptions& options) {
  SamplerOptions runs = options.sampler;
  runs.rank = 0;  // Where workers come and go there are ranks beyond those that the job begins with.
  PS_ASSIGN_OR_RETURN(Sampler share, Sampler::Create(runs));
  runs.num_workers = 1;
  runs.batch_size = share.batch_size();
  PS_ASSIGN_OR_RETURN(Sampler sampler, Sampler::Create(runs));
  return std::make_unique<HandedOutRuns>(options, std::move(sampler));
}

}  // namespace ps
