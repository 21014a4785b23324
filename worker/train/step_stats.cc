#include "worker/train/step_stats.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>
#include "absl/strings/str_format.h"
#include "worker/train/training_records.h"

namespace ps {
namespace {

struct ExchangeTimes {
  double push_s = 0;
  double wait_s = 0;
  double pull_s = 0;
};

// What of an exchange was waited for. What was hidden behind computation came last.
ExchangeTimes Exposed(const ExchangeResult& exchanged, double exposed_s) {
  ExchangeTimes times = {.push_s = exchanged.push_s, .wait_s = exchanged.wait_s, .pull_s = exchanged.pull_s};
  double hidden_s = times.push_s + times.wait_s + times.pull_s - exposed_s;
  for (double* part : {&times.pull_s, &times.wait_s, &times.push_s}) {
    const double less = std::clamp(hidden_s, 0.0, *part);
    *part -= less;
    hidden_s -= less;
  }
  return times;
}

const char* Name(PushAnswer answer) {
  switch (answer) {
    case PushAnswer::kApplied:
      return "APPLIED";
    case PushAnswer::kDuplicate:
      return "DUPLICATE";
    case PushAnswer::kStale:
      return "STALE";
    case PushAnswer::kFenced:
      return "FENCED";
    case PushAnswer::kNone:
      break;
  }
  return "NONE";
}

bool All(const std::vector<PushAnswer>& answers, PushAnswer answer) {
  return std::all_of(answers.begin(), answers.end(), [&](PushAnswer each) { return each == answer; });
}

nlohmann::ordered_json Names(const std::vector<PushAnswer>& answers) {
  if (All(answers, answers.front())) return Name(answers.front());
  nlohmann::ordered_json names = nlohmann::ordered_json::array();
  for (const PushAnswer answer : answers) names.push_back(Name(answer));
  return names;
}

nlohmann::ordered_json Fields(const StepRecord& step, const ExchangeTimes& times) {
  nlohmann::ordered_json fields = {{"step", step.push.step}};
  if (step.local) fields["batch"] = step.batch;
  fields["version"] = step.push.version;
  fields["loss"] = step.computed.loss;
  fields["samples"] = step.samples;
  fields["forward_s"] = step.computed.forward_s;
  fields["backward_s"] = step.computed.backward_s;
  if (step.computed.idle_s > 0) fields["idle_s"] = step.computed.idle_s;
  fields["push_s"] = times.push_s;
  fields["wait_s"] = times.wait_s;
  fields["pull_s"] = times.pull_s;
  const std::vector<PushAnswer>& answers = step.exchanged.answers;
  if (!All(answers, PushAnswer::kApplied)) fields["answer"] = Names(answers);
  return fields;
}

constexpr std::chrono::seconds kEvery(2);

}  // namespace

StepTotals& StepTotals::operator+=(const StepTotals& more) {
  samples += more.samples;
  train_s += more.train_s;
  forward_s += more.forward_s;
  backward_s += more.backward_s;
  push_s += more.push_s;
  wait_s += more.wait_s;
  pull_s += more.pull_s;
  dropped_pushes += more.dropped_pushes;
  dropped_samples += more.dropped_samples;
  return *this;
}

void StepStats::Add(const StepRecord& step, TimePoint now) {
  const ExchangeTimes times = Exposed(step.exchanged, step.exposed_s);
  metrics_.Write("step", Fields(step, times));
  if (records_ != nullptr) {
    records_->OnStep(step, {.push_s = times.push_s, .wait_s = times.wait_s, .pull_s = times.pull_s}, now);
  }
  progress_.Step(step.batch + 1, step.computed.loss, step.samples, now);
  if (reports_.tell) Report({.push_s = times.push_s, .wait_s = times.wait_s, .pull_s = times.pull_s}, step, now);
  if (step.batch < warm_up_steps_) return;
  totals_.samples += step.samples;
  totals_.forward_s += step.computed.forward_s;
  totals_.backward_s += step.computed.backward_s;
  totals_.push_s += times.push_s;
  totals_.wait_s += times.wait_s;
  totals_.pull_s += times.pull_s;
  const std::vector<PushAnswer>& answers = step.exchanged.answers;
  if (std::find(answers.begin(), answers.end(), PushAnswer::kStale) == answers.end()) return;
  ++totals_.dropped_pushes;
  totals_.dropped_samples += step.push.samples;
}

void StepStats::Report(StepReport report, const StepRecord& step, TimePoint now) {
  report.step = step.push.step;
  report.samples = step.samples;
  if (step.samples > 0) report.loss = step.computed.loss;
  report.forward_s = step.computed.forward_s;
  report.backward_s = step.computed.backward_s;
  // Where an exchange goes on during the next batch, that batch has begun already: so the rest is what is left of all
  // the time until now.
  reported_s_ += report.forward_s + report.backward_s + report.push_s + report.wait_s + report.pull_s;
  report.other_s = std::max(0.0, Seconds(now - began_) - reported_s_);
  reported_s_ += report.other_s;
  const double left = std::max(0.0, static_cast<double>(total_batches_ - step.batch) * reports_.steps_per_batch);
  report.all_steps = step.push.step + static_cast<uint64_t>(std::ceil(left - 1e-9));
  reports_.tell(report);
}

void StepStats::AddTime(int64_t batch, double seconds) {
  if (batch >= warm_up_steps_) totals_.train_s += seconds;
}

void Progress::Step(int64_t batches_done, double loss, int64_t samples, TimePoint now) {
  samples_since_line_ += samples;
  loss_sum_ += loss * static_cast<double>(samples);
  const bool last = batches_done == total_batches_;
  if (now - last_line_ < kEvery && !last) return;
  const double rate = static_cast<double>(samples_since_line_) / std::max(Seconds(now - last_line_), 1e-9);
  const double mean_loss = loss_sum_ / static_cast<double>(std::max<int64_t>(samples_since_line_, 1));
  const auto done = static_cast<double>(std::max<int64_t>(batches_done - first_batch_, 1));  // Batches may come late.
  const auto left =
      static_cast<int64_t>(Seconds(now - began_) / done * static_cast<double>(total_batches_ - batches_done));
  spdlog::info("{}", absl::StrFormat("step %d of %d, loss %.5g, %.0f samples/s, %d:%02d left", batches_done,
                                     total_batches_, mean_loss, rate, left / 60, left % 60));
  last_line_ = now;
  samples_since_line_ = 0;
  loss_sum_ = 0;
}

}  // namespace ps
