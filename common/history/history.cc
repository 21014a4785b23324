#include "common/history/history.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/history/job_json.h"
#include "common/proto_values.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kNamed = 4;               // More workers than these are given by number.
constexpr double kSlowStepTimes = 10;      // A step that took so many times what a step takes is an event.
constexpr double kSlowStepLeast_s = 0.1;   // What is shorter is no news, as in a worker's log.
constexpr size_t kSlowStepsAtOnce = 3;     // In one snapshot.
constexpr uint64_t kSlowAgainMs = 60'000;  // A rank is said to be slow no more often.

bool SameLoss(const v1::LossRange& a, const v1::LossRange& b) {
  const auto same = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  return a.batches() == b.batches() && same(a.mean(), b.mean()) && same(a.least(), b.least()) &&
         same(a.largest(), b.largest());
}

// The job's samples at the step of an evaluation, which ended some steps later.
uint64_t SamplesAt(const v1::Evaluation& evaluation, const v1::ProgressStatus& progress) {
  if (progress.step() == 0 || evaluation.step() >= progress.step()) return progress.samples();
  return static_cast<uint64_t>(static_cast<double>(progress.samples()) * static_cast<double>(evaluation.step()) /
                               static_cast<double>(progress.step()));
}

Observation OneValue(double value, double t, uint64_t steps, uint64_t samples) {
  return {.t = t, .steps = steps, .samples = samples, .mean = value, .least = value, .largest = value};
}

std::string DescribeEvaluation(const v1::Evaluation& evaluation) {
  return absl::StrCat(
      evaluation.split(), ": ",
      evaluation.has_accuracy() ? absl::StrFormat("accuracy %.1f %%, ", 100 * evaluation.accuracy()) : "",
      absl::StrFormat("loss %.4g", evaluation.loss()), " at step ", Grouped(evaluation.step()));
}

}  // namespace

void History::AddObservation(const std::string& series, const Observation& observation) {
  auto found = series_.find(series);
  if (found == series_.end()) {
    if (series_.size() == kMaxSeries) return;
    found = series_.try_emplace(series).first;
  }
  found->second.Add(observation, ++number_);
}

void History::AddEvent(uint64_t unix_ms, const std::string& kind, const std::string& text) {
  events_.Add(unix_ms, kind, text);
}

const Series* History::Find(const std::string& series) const {
  const auto found = series_.find(series);
  return found == series_.end() ? nullptr : &found->second;
}

size_t History::series_bytes() const {
  size_t bytes = 0;
  for (const auto& [name, series] : series_) bytes += series.bytes();
  return bytes;
}

nlohmann::ordered_json History::SeriesJson(std::string_view cursor) const {
  const size_t dot = cursor.find('.');
  uint64_t id = 0;
  uint32_t since = 0;
  const bool good = dot != std::string_view::npos && absl::SimpleAtoi(std::string(cursor.substr(0, dot)), &id) &&
                    absl::SimpleAtoi(std::string(cursor.substr(dot + 1)), &since) && id == id_ && since <= number_;
  if (!good) since = 0;
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const auto& [name, series] : series_) {
    nlohmann::ordered_json json = series.Json(since);
    if (!json.is_null()) all[name] = std::move(json);
  }
  return {{"cursor", absl::StrCat(id_, ".", number_)}, {"series", std::move(all)}};
}

void History::Observe(const v1::StatusReply& status, double unix_s) {
  const uint64_t unix_ms = static_cast<uint64_t>(std::max(unix_s, 0.0) * 1000);
  // By the job's own time, which goes on whatever becomes of the clock. After a rollback it begins anew, and the curves
  // go on.
  const double running_s = status.progress().running_s();
  if (running_s < last_running_s_) before_s_ = last_t_;
  if (running_s > 0 || status.phase() == v1::PHASE_RUNNING) {
    has_run_ = true;
    last_running_s_ = running_s;
    last_t_ = std::max(last_t_, before_s_ + running_s);
  }
  const double t = last_t_;
  ObservePhase(status, unix_ms);
  ObserveWorkers(status, unix_ms);
  ObserveStuck(status, unix_ms);
  ObserveCheckpoints(status, unix_ms);
  ObserveHyperparameters(status, unix_ms);
  ObserveEvaluations(status, t, unix_ms);
  ObserveSlowSteps(status, unix_ms);
  if (has_run_) ObserveSeries(status, t);
}

void History::ObservePhase(const v1::StatusReply& status, uint64_t unix_ms) {
  const v1::ProgressStatus& progress = status.progress();
  const bool again = seen_.generation != 0 && status.generation() != seen_.generation;
  if (again || progress.rollbacks() > seen_.rollbacks) {
    AddEvent(unix_ms, "rollback",
             absl::StrCat("the job went back to a checkpoint: generation ", status.generation(), ", step ",
                          Grouped(progress.step())));
  }
  seen_.generation = status.generation();
  seen_.rollbacks = progress.rollbacks();
  if (status.phase() == seen_.phase) return;
  seen_.phase = status.phase();
  std::string text = absl::StrCat("the job is ", PhaseName(status.phase()));
  if (status.phase() == v1::PHASE_FAILED) text = absl::StrCat("the job failed: ", status.failure());
  if (status.phase() == v1::PHASE_GATHERING && !status.waiting_for().empty()) {
    absl::StrAppend(&text, ": ", status.waiting_for());
  }
  AddEvent(unix_ms, "phase", text);
}

void History::AddOfWorkers(uint64_t unix_ms, const std::string& kind, const std::map<uint32_t, std::string>& workers,
                           const std::string& what, const std::string& several) {
  if (workers.size() <= kNamed) {
    for (const auto& [rank, name] : workers) AddEvent(unix_ms, kind, absl::StrCat(name, " ", what));
    return;
  }
  std::vector<std::string> runs;
  for (auto each = workers.begin(); each != workers.end();) {
    const uint32_t begin = each->first;
    uint32_t end = begin;
    for (; each != workers.end() && each->first <= end + 1; ++each) end = each->first;
    runs.push_back(end == begin ? absl::StrCat(begin) : absl::StrCat(begin, " to ", end));
  }
  AddEvent(unix_ms, kind, absl::StrCat(workers.size(), " workers ", several, ": ranks ", absl::StrJoin(runs, ", ")));
}

void History::ObserveSlow(const v1::WorkerStatus& worker, SeenWorker& seen, uint64_t unix_ms) {
  if (worker.slow() == seen.slow) return;
  if (worker.slow()) {
    const auto told = told_slow_ms_.find(worker.rank());
    if (told != told_slow_ms_.end() && unix_ms < told->second + kSlowAgainMs) return;
    told_slow_ms_[worker.rank()] = unix_ms;
    AddEvent(unix_ms, "slow",
             absl::StrCat(seen.name, " is slow: it makes ", SpokenRate(worker.steps_per_s()),
                          " steps/s, less than half of what the median rank makes"));
  } else if (!worker.done()) {
    AddEvent(unix_ms, "goes on", absl::StrCat(seen.name, " is no longer slow"));
  }
  seen.slow = worker.slow();
}

void History::ObserveWorkers(const v1::StatusReply& status, uint64_t unix_ms) {
  std::map<uint32_t, std::string> joined, suspect, done, lost, left;
  std::set<uint32_t> present;
  const bool any_lost = status.progress().worker_losses() > seen_.worker_losses;
  const auto gone = [&](uint32_t rank, const SeenWorker& worker) {
    (any_lost && !worker.done ? lost : left)[rank] = worker.name;
  };
  for (const v1::WorkerStatus& worker : status.workers()) {
    present.insert(worker.rank());
    SeenWorker& seen = seen_.workers[worker.rank()];
    if (seen.incarnation != worker.incarnation() || seen.name.empty()) {
      if (!seen.name.empty()) gone(worker.rank(), seen);
      seen = {.incarnation = worker.incarnation(), .name = WorkerName(worker)};
      joined[worker.rank()] = seen.name;
    }
    if (worker.suspect() && !seen.suspect) suspect[worker.rank()] = seen.name;
    if (worker.done() && !seen.done) done[worker.rank()] = seen.name;
    seen.suspect = worker.suspect();
    seen.done = worker.done();
  }
  for (auto each = seen_.workers.begin(); each != seen_.workers.end();) {
    if (present.contains(each->first)) {
      ++each;
      continue;
    }
    gone(each->first, each->second);
    told_slow_ms_.erase(each->first);
    each = seen_.workers.erase(each);
  }
  seen_.worker_losses = status.progress().worker_losses();
  AddOfWorkers(unix_ms, "lost", lost, "was lost", "were lost");
  AddOfWorkers(unix_ms, "left", left, "left", "left");
  AddOfWorkers(unix_ms, "joined", joined, "joined", "joined");
  AddOfWorkers(unix_ms, "suspect", suspect, "is not connected any more", "are not connected any more");
  AddOfWorkers(unix_ms, "done", done, "is done", "are done");
  for (const v1::WorkerStatus& worker : status.workers()) ObserveSlow(worker, seen_.workers[worker.rank()], unix_ms);
}

void History::ObserveStuck(const v1::StatusReply& status, uint64_t unix_ms) {
  const std::string& stuck = status.progress().stuck();
  const double now = static_cast<double>(unix_ms) / 1000;
  if (!stuck.empty() && !seen_.stuck) {
    AddEvent(unix_ms, "stuck", stuck);
    stuck_since_unix_s_ = now - status.progress().since_version_s();
  }
  if (stuck.empty() && seen_.stuck && status.phase() == v1::PHASE_RUNNING) {
    AddEvent(unix_ms, "goes on",
             absl::StrCat("the job goes on at step ", Grouped(status.progress().step()), ", after ",
                          Spoken(std::max(now - stuck_since_unix_s_, 0.0))));
  }
  seen_.stuck = !stuck.empty();
}

void History::ObserveCheckpoints(const v1::StatusReply& status, uint64_t unix_ms) {
  const v1::CheckpointStatus& checkpoints = status.checkpoints();
  if (!checkpoints.path().empty() &&
      (checkpoints.path() != seen_.checkpoint || checkpoints.version() != seen_.checkpoint_version)) {
    AddEvent(unix_ms, "checkpoint",
             absl::StrCat("checkpoint of version ", Grouped(checkpoints.version()), ": ", checkpoints.path()));
  }
  const uint64_t failures = status.progress().checkpoint_failures();
  if ((!checkpoints.failure().empty() && checkpoints.failure() != seen_.checkpoint_failure) ||
      failures > seen_.checkpoint_failures) {
    AddEvent(unix_ms, "checkpoint failed",
             absl::StrCat("a checkpoint failed",
                          checkpoints.failure().empty() ? "" : absl::StrCat(": ", checkpoints.failure())));
  }
  seen_.checkpoint = checkpoints.path();
  seen_.checkpoint_version = checkpoints.version();
  seen_.checkpoint_failure = checkpoints.failure();
  seen_.checkpoint_failures = failures;
}

void History::ObserveHyperparameters(const v1::StatusReply& status, uint64_t unix_ms) {
  for (const v1::Hyperparameter& each : status.hyperparameters()) {
    const auto [found, is_new] = seen_.hyperparameters.try_emplace(each.name(), each.value());
    if (is_new || found->second == each.value()) continue;
    AddEvent(unix_ms, "hyperparameter set",
             absl::StrCat(each.name(), " is ", ExactText(each.value()), " now; it was ", ExactText(found->second)));
    found->second = each.value();
  }
  if (!status.has_schedule()) return;
  const absl::StatusOr<Schedule> schedule = FromProto(status.schedule());
  const std::string text = schedule.ok() ? ToString(*schedule) : status.schedule().name();
  if (!seen_.schedule.empty() && text != seen_.schedule) {
    AddEvent(unix_ms, "hyperparameter set", absl::StrCat("the schedule is another one now: ", text));
  }
  seen_.schedule = text;
}

void History::ObserveEvaluations(const v1::StatusReply& status, double t, uint64_t unix_ms) {
  for (const v1::Evaluation& each : status.progress().evaluations()) {
    const SeenEvaluation now = {.step = each.step(), .version = each.version()};
    const auto found = seen_.evaluations.find(each.split());
    if (found != seen_.evaluations.end() && found->second == now) continue;
    if (found == seen_.evaluations.end() && seen_.evaluations.size() == kMaxSeries) continue;
    seen_.evaluations[each.split()] = now;
    const uint64_t samples = SamplesAt(each, status.progress());
    AddObservation(absl::StrCat("loss.", each.split()), OneValue(each.loss(), t, each.step(), samples));
    if (each.has_accuracy()) {
      AddObservation(absl::StrCat("accuracy.", each.split()), OneValue(each.accuracy(), t, each.step(), samples));
    }
    AddEvent(unix_ms, "evaluation", DescribeEvaluation(each));
  }
}

void History::ObserveSlowSteps(const v1::StatusReply& status, uint64_t unix_ms) {
  const v1::ProgressStatus& progress = status.progress();
  std::set<std::pair<uint32_t, uint64_t>> slowest;
  size_t told = 0;
  const double usual = WorkerStepSeconds(status);
  for (const v1::SlowestStep& each : progress.slowest()) {
    const std::pair<uint32_t, uint64_t> key = {each.rank(), each.step().unix_ms()};
    slowest.insert(key);
    const double seconds = each.step().seconds();
    const bool slow = usual > 0 && seconds > std::max(kSlowStepTimes * usual, kSlowStepLeast_s);
    if (!slow || seen_.slowest.contains(key) || told == kSlowStepsAtOnce) continue;
    ++told;
    const std::string times = DescribeTimes(each.step().times());
    AddEvent(unix_ms, "slow step",
             absl::StrCat("rank ", each.rank(), " took ", Spoken(seconds), " for step ", Grouped(each.step().step()),
                          times.empty() ? "" : ": ", times));
  }
  seen_.slowest = std::move(slowest);
}

void History::ObserveSeries(const v1::StatusReply& status, double t) {
  const v1::ProgressStatus& progress = status.progress();
  const bool advanced = progress.step() != seen_.step;
  if (progress.has_loss() && (advanced || !SameLoss(progress.loss(), seen_.loss))) {
    const v1::LossRange& loss = progress.loss();
    AddObservation("loss", {.t = t,
                            .steps = progress.step(),
                            .samples = progress.samples(),
                            .mean = loss.mean(),
                            .least = loss.least(),
                            .largest = loss.largest(),
                            .weight = static_cast<double>(std::max<uint64_t>(loss.batches(), 1))});
    seen_.loss = loss;
  }
  seen_.step = progress.step();
  if (status.phase() != v1::PHASE_RUNNING) return;
  AddObservation("samples_per_s", OneValue(progress.samples_per_s(), t, progress.step(), progress.samples()));
  AddObservation("steps_per_s", OneValue(progress.steps_per_s(), t, progress.step(), progress.samples()));
  const auto optimizer = status.settings().find("optimizer");
  const bool local = optimizer != status.settings().end() && optimizer->second == "local";  // Servers know no rate.
  if (status.shard_status_size() > 0 && !local) {
    AddObservation("learning_rate",
                   OneValue(status.shard_status(0).learning_rate(), t, progress.step(), progress.samples()));
  }
}

}  // namespace ps
