// What a worker records of its training beside its metrics file: curves for TensorBoard, and a trace.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/event_file.h"
#include "common/sync.h"
#include "common/trace.h"

namespace ps {

struct Evaluation;
struct Mark;
struct StepRecord;
struct WorkerOptions;

// Seconds of an exchange that computation did not hide.
struct ExposedTimes {
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// The scalars of steps. A pure value; time is passed in.
class StepScalars {
 public:
  explicit StepScalars(TimePoint began) : since_(began) {}

  // The step's loss, if it has any, and once a second what the steps since then come to: samples and steps a second,
  // and the mean seconds of each phase in a step.
  std::vector<Scalar> Add(const StepRecord& step, const ExposedTimes& exposed, TimePoint now);

 private:
  static constexpr std::chrono::seconds kEvery{1};

  TimePoint since_;
  uint64_t steps_ = 0;
  uint64_t samples_ = 0;
  std::map<std::string, double> phases_;  // Seconds, by the scalar's tag.
};

// OnStep and OnRolledBack are the training thread's; OnEvaluated may be called by another.
class TrainingRecords {
 public:
  // Finds out what cannot be written, before the worker joins: INVALID_ARGUMENT, naming the flag.
  static absl::StatusOr<std::unique_ptr<TrainingRecords>> Open(const WorkerOptions& options);

  // The worker has joined as this rank, perhaps again.
  absl::Status Begin(uint32_t rank, const std::string& job);
  void OnStep(const StepRecord& step, const ExposedTimes& exposed, TimePoint now);
  void OnEvaluated(const std::string& split, const Mark& mark, const Evaluation& found);
  // The job went back: the next step is this one.
  void OnRolledBack(uint64_t step);

  TraceWriter& trace() { return *trace_; }

 private:
  TrainingRecords(std::string tensorboard_dir, std::unique_ptr<TraceWriter> trace)
      : tensorboard_dir_(std::move(tensorboard_dir)), trace_(std::move(trace)), scalars_(Now()) {}
  void Trace(const StepRecord& step);

  const std::string tensorboard_dir_;  // Empty: nothing is written for TensorBoard.
  const std::unique_ptr<TraceWriter> trace_;
  StepScalars scalars_;  // The training thread's.

  Mutex mutex_;
  std::optional<uint32_t> rank_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<EventFile> events_ ABSL_GUARDED_BY(mutex_);
  // Where the worker takes steps by itself, curves go by batches: how many were done when a push of this step was the
  // next. The last ones.
  std::map<uint64_t, int64_t> batches_of_step_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
