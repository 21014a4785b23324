#include "worker/client/training_report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMostSlowest = 4;    // Of a report (ps.proto).
constexpr size_t kMaxToldNameBytes = 64;  // Of a split or a device.

void AddTimes(const v1::StepTimes& more, v1::StepTimes& sum) {
  sum.set_forward(sum.forward() + more.forward());
  sum.set_backward(sum.backward() + more.backward());
  sum.set_push(sum.push() + more.push());
  sum.set_wait(sum.wait() + more.wait());
  sum.set_pull(sum.pull() + more.pull());
  sum.set_other(sum.other() + more.other());
}

}  // namespace

v1::StepTimes TimesOf(const StepReport& step) {
  v1::StepTimes times;
  times.set_forward(step.forward_s);
  times.set_backward(step.backward_s);
  times.set_push(step.push_s);
  times.set_wait(step.wait_s);
  times.set_pull(step.pull_s);
  times.set_other(step.other_s);
  return times;
}

double SecondsOf(const StepReport& step) {
  return step.forward_s + step.backward_s + step.push_s + step.wait_s + step.pull_s + step.other_s;
}

void TrainingReport::AddStep(const StepReport& step, uint64_t unix_ms) {
  // What was counted of pushes stays, but for a push of the step that is told of now.
  if (!std::exchange(told_, true) && steps_ > 0 && last_step_ == step.step) {
    --steps_;
    samples_ -= last_push_samples_;
  }
  ++steps_;
  samples_ += step.samples;
  if (step.all_steps > 0) all_steps_ = step.all_steps;
  if (!first_step_.has_value()) first_step_ = step.step;
  last_step_ = step.step;
  if (step.loss.has_value()) batches_.AddLoss(*step.loss, step.samples);
  const double seconds = SecondsOf(step);
  if (seconds > 0) {
    has_seconds_ = true;
    const v1::StepTimes times = TimesOf(step);
    AddTimes(times, seconds_);
    if (batches_.IsAmongSlowest(seconds)) {
      v1::SlowStep slow;
      slow.set_step(step.step);
      slow.set_seconds(seconds);
      *slow.mutable_times() = times;
      slow.set_unix_ms(unix_ms);
      batches_.KeepSlowest(slow);
    }
  }
  news_ = true;
}

void TrainingReport::AddPush(uint64_t step, uint32_t samples) {
  if (told_) return;
  ++steps_;
  samples_ += samples;
  if (!first_step_.has_value()) first_step_ = step;
  last_step_ = step;
  last_push_samples_ = samples;
  news_ = true;
}

void TrainingReport::Batches::AddLoss(double value, uint32_t samples) {
  // A loss that is no number has no place in a range; the mean says that there was one.
  const bool first = loss.batches() == 0;
  if (first || std::isnan(loss.least()) || value < loss.least()) loss.set_least(value);
  if (first || std::isnan(loss.largest()) || value > loss.largest()) loss.set_largest(value);
  loss.set_batches(loss.batches() + 1);
  const double weight = std::max(1U, samples);
  loss_sum += value * weight;
  loss_samples += weight;
}

void TrainingReport::Batches::Add(const Batches& more) {
  if (more.loss.batches() > 0) {
    const bool first = loss.batches() == 0;
    if (first || std::isnan(loss.least()) || more.loss.least() < loss.least()) loss.set_least(more.loss.least());
    if (first || std::isnan(loss.largest()) || more.loss.largest() > loss.largest()) {
      loss.set_largest(more.loss.largest());
    }
    loss.set_batches(loss.batches() + more.loss.batches());
    loss_sum += more.loss_sum;
    loss_samples += more.loss_samples;
  }
  for (const v1::SlowStep& step : more.slowest) {
    if (IsAmongSlowest(step.seconds())) KeepSlowest(step);
  }
}

bool TrainingReport::Batches::IsAmongSlowest(double seconds) const {
  return slowest.size() < kMostSlowest || seconds > slowest.back().seconds();
}

void TrainingReport::Batches::KeepSlowest(const v1::SlowStep& step) {
  const auto place = std::find_if(slowest.begin(), slowest.end(),
                                  [&](const v1::SlowStep& other) { return other.seconds() < step.seconds(); });
  slowest.insert(place, step);
  if (slowest.size() > kMostSlowest) slowest.pop_back();
}

// Evaluations are told later than the steps that they follow. Batches are mostly as large as each other.
uint64_t TrainingReport::SamplesAt(uint64_t step) const {
  if (!first_step_.has_value() || step <= *first_step_) return 0;
  const auto made = static_cast<double>(last_step_ + 1 - *first_step_);
  const double part = std::min(1.0, static_cast<double>(step - *first_step_) / made);
  return static_cast<uint64_t>(std::llround(part * static_cast<double>(samples_)));
}

void TrainingReport::AddEvaluation(const EvaluationReport& evaluation) {
  v1::Evaluation told;
  told.set_split(Printable(evaluation.split, kMaxToldNameBytes));
  told.set_step(evaluation.step);
  told.set_version(evaluation.version);
  told.set_loss(evaluation.loss);
  if (evaluation.accuracy.has_value()) told.set_accuracy(*evaluation.accuracy);
  told.set_samples(SamplesAt(evaluation.step));
  if (evaluations_[0].has_value() && evaluations_[0]->split() != told.split()) evaluations_[1] = evaluations_[0];
  evaluations_[0] = std::move(told);
  news_ = true;
}

void TrainingReport::SetDevice(const std::string& device) { device_ = Printable(device, kMaxToldNameBytes); }

v1::WorkerReport TrainingReport::Take() {
  v1::WorkerReport report;
  report.set_number(++number_);
  report.set_steps(steps_);
  report.set_samples(samples_);
  report.set_all_steps(all_steps_);
  reported_ = std::exchange(batches_, {});
  if (reported_.loss.batches() > 0) {
    *report.mutable_loss() = reported_.loss;
    report.mutable_loss()->set_mean(reported_.loss_sum / reported_.loss_samples);
  }
  if (has_seconds_) *report.mutable_seconds() = seconds_;
  if (evaluations_[0].has_value()) *report.mutable_evaluation() = *evaluations_[0];
  if (evaluations_[1].has_value()) *report.mutable_other_evaluation() = *evaluations_[1];
  report.set_dropped_reports(dropped_);
  report.set_device(device_);
  for (const v1::SlowStep& slow : reported_.slowest) *report.add_slowest() = slow;
  news_ = false;
  return report;
}

void TrainingReport::TakeBack() {
  batches_.Add(reported_);
  reported_ = {};
  news_ = true;
}

}  // namespace ps
