#include "worker/train/training_records.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/status.h"
#include "worker/train/evaluator.h"
#include "worker/train/options.h"
#include "worker/train/step_stats.h"
#include "worker/train/steps/exchanges.h"

namespace ps {
namespace {

constexpr size_t kKeptSteps = 4096;  // Evaluations of weights that were copied so many exchanges ago find their batch.
constexpr char kTensorboardFlag[] = "--tensorboard_dir";

}  // namespace

std::vector<Scalar> StepScalars::Add(const StepRecord& step, const ExposedTimes& exposed, TimePoint now) {
  std::vector<Scalar> scalars;
  if (step.samples > 0) scalars.push_back({.tag = "loss/train", .value = step.computed.loss});
  ++steps_;
  samples_ += step.samples;
  phases_["seconds/forward"] += step.computed.forward_s;
  phases_["seconds/backward"] += step.computed.backward_s;
  phases_["seconds/push"] += exposed.push_s;
  phases_["seconds/wait"] += exposed.wait_s;
  phases_["seconds/pull"] += exposed.pull_s;
  if (now - since_ < kEvery) return scalars;
  const double seconds = Seconds(now - since_);
  const auto steps = static_cast<double>(steps_);
  scalars.push_back({.tag = "speed/samples_per_s", .value = static_cast<double>(samples_) / seconds});
  scalars.push_back({.tag = "speed/steps_per_s", .value = steps / seconds});
  for (const auto& [tag, sum] : phases_) scalars.push_back({.tag = tag, .value = sum / steps});
  *this = StepScalars(now);
  return scalars;
}

absl::StatusOr<std::unique_ptr<TrainingRecords>> TrainingRecords::Open(const WorkerOptions& options) {
  if (!options.tensorboard_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.tensorboard_dir, error);
    if (error) {
      return InvalidArgument(kTensorboardFlag, "=", options.tensorboard_dir,
                             ": the folder cannot be made: ", error.message());
    }
  }
  PS_ASSIGN_OR_RETURN(std::unique_ptr<TraceWriter> trace, TraceWriter::Open(options.trace_file, options.traced_steps));
  return std::unique_ptr<TrainingRecords>(new TrainingRecords(options.tensorboard_dir, std::move(trace)));
}

absl::Status TrainingRecords::Begin(uint32_t rank, const std::string& job) {
  trace_->Begin({.program = "ps_worker", .who = "rank", .number = rank, .job = job});
  if (tensorboard_dir_.empty()) return absl::OkStatus();
  MutexLock lock(mutex_);
  if (std::exchange(rank_, rank) == rank) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(events_, EventFile::Open(kTensorboardFlag, absl::StrCat(tensorboard_dir_, "/rank-", rank)));
  return absl::OkStatus();
}

void TrainingRecords::OnStep(const StepRecord& step, const ExposedTimes& exposed, TimePoint now) {
  if (trace_->Wants(step.push.step)) Trace(step);
  if (tensorboard_dir_.empty()) return;
  const std::vector<Scalar> scalars = scalars_.Add(step, exposed, now);
  MutexLock lock(mutex_);
  if (step.local) {
    batches_of_step_[step.push.step + 1] = step.batch + 1;
    if (batches_of_step_.size() > kKeptSteps) batches_of_step_.erase(batches_of_step_.begin());
  }
  if (events_ == nullptr || scalars.empty()) return;
  events_->Add(step.local ? step.batch : static_cast<int64_t>(step.push.step), UnixSeconds(), scalars);
}

void TrainingRecords::OnEvaluated(const std::string& split, const Mark& mark, const Evaluation& found) {
  std::vector<Scalar> scalars = {{.tag = "loss/" + split, .value = found.loss}};
  if (found.accuracy.has_value()) scalars.push_back({.tag = "accuracy/" + split, .value = *found.accuracy});
  MutexLock lock(mutex_);
  if (events_ == nullptr) return;
  const auto batches = batches_of_step_.find(mark.step);
  const auto step = static_cast<int64_t>(mark.step);
  events_->Add(batches == batches_of_step_.end() ? step : batches->second, UnixSeconds(), scalars);
}

void TrainingRecords::OnRolledBack(uint64_t step) {
  trace_->AddMark(absl::StrCat("rolled back to step ", step), Now());
  MutexLock lock(mutex_);
  if (events_ == nullptr) return;
  const auto batches = batches_of_step_.find(step);
  events_->Restart(batches == batches_of_step_.end() ? static_cast<int64_t>(step) : batches->second, UnixSeconds());
  batches_of_step_.erase(batches_of_step_.upper_bound(step), batches_of_step_.end());
}

void TrainingRecords::Trace(const StepRecord& step) {
  const StepResult& computed = step.computed;
  if (computed.began == TimePoint()) return;  // An empty batch.
  const auto after = [](TimePoint from, double seconds) {
    return from + std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  };
  TraceSpan span = {.row = kComputeRow, .nests = true};
  const auto add = [&](const char* name, TimePoint begin, TimePoint end, TraceArgs args) {
    span.name = absl::StrCat(name, " ", step.batch);
    span.begin = begin;
    span.end = end;
    span.args = std::move(args);
    trace_->Add(span);
  };
  TraceArgs forward;
  forward.Add("step", step.push.step).Add("batch", step.batch).Add("version", step.push.version);
  forward.Add("samples", step.samples).Add("loss", computed.loss).Add("forward_s", computed.forward_s);
  add("forward", computed.began, computed.turned, std::move(forward));
  add("backward", computed.turned, computed.ended,
      TraceArgs().Add("step", step.push.step).Add("backward_s", computed.backward_s - computed.update_s));
  if (computed.idle_s > 0) add("idle", computed.ended, after(computed.ended, computed.idle_s), {});
  if (computed.update_s > 0) {
    add("optimizer", computed.update_began, after(computed.update_began, computed.update_s), {});
  }
}

}  // namespace ps
