#include "common/history/run_record.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/history/job_json.h"
#include "common/program.h"
#include "common/text.h"

namespace ps {
namespace {

using nlohmann::json;

constexpr double kRateOver_s = 10;
constexpr size_t kMedianOf = 100;
constexpr double kLossEvery_s = 0.05;  // Losses of so long are one observation.
constexpr double kStuckAfter_s = 10, kStuckMedians = 10;
constexpr double kFinelyFor_s = 60;  // For so long the run is looked at four times a second, then once.
constexpr int kMaxLooks = 40;        // At a time in which nothing was written.
constexpr double kQuietFor_s = 15;   // After the last line.
constexpr size_t kMaxArrivals = 256;
constexpr size_t kMaxSlowest = 32;
constexpr size_t kMaxSplits = 8;
constexpr size_t kMaxSaid = 20;
constexpr size_t kMaxName = 200;
constexpr uint32_t kMaxRank = 1 << 20;

// Values of a line that may have any type.
double NumberOf(const json& line, const char* field, double otherwise = 0) {
  const auto found = line.find(field);
  if (found == line.end()) return otherwise;
  // What is not finite is written as null.
  if (found->is_null()) return std::numeric_limits<double>::quiet_NaN();
  return found->is_number() ? found->get<double>() : otherwise;
}

uint64_t CountOf(const json& line, const char* field, uint64_t otherwise = 0) {
  const double number = NumberOf(line, field, -1);
  return number >= 0 && number < 1e18 ? static_cast<uint64_t>(number) : otherwise;
}

double SecondsIn(const json& line, const char* field) {
  const double seconds = NumberOf(line, field);
  return seconds >= 0 && seconds < 1e9 ? seconds : 0;
}

std::string TextOf(const json& line, const char* field) {
  const auto found = line.find(field);
  return found != line.end() && found->is_string() ? Printable(found->get_ref<const std::string&>(), kMaxName) : "";
}

const json& FlagsOf(const json& line) {
  static const json none = json::object();
  const auto found = line.find("flags");
  return found != line.end() && found->is_object() ? *found : none;
}

// The other names of two modes are older.
std::string ModeOf(const json& line) {
  const std::string mode = TextOf(line, "mode");
  return mode == "sync" ? "bsp" : mode == "async" ? "asp" : mode;
}

// A flag's value, which is written as text.
uint64_t FlagNumber(const json& line, const char* flag) {
  uint64_t number = 0;
  return absl::SimpleAtoi(TextOf(FlagsOf(line), flag), &number) ? number : 0;
}

bool SaysStale(const json& line) {
  const auto answer = line.find("answer");
  if (answer == line.end()) return false;
  const auto stale = [](const json& each) {
    return each.is_string() && absl::EqualsIgnoreCase(each.get_ref<const std::string&>(), "stale");
  };
  return answer->is_array() ? std::any_of(answer->begin(), answer->end(), stale) : stale(*answer);
}

void AddLoss(v1::LossRange& range, double& weight, double loss, double samples) {
  const bool first = range.batches() == 0;
  range.set_batches(range.batches() + 1);
  range.set_mean(first ? loss : (range.mean() * weight + loss * samples) / (weight + samples));
  range.set_least(first ? loss : std::fmin(range.least(), loss));
  range.set_largest(first ? loss : std::fmax(range.largest(), loss));
  weight += samples;
}

void AddTimes(v1::StepTimes& total, const v1::StepTimes& more) {
  total.set_forward(total.forward() + more.forward());
  total.set_backward(total.backward() + more.backward());
  total.set_push(total.push() + more.push());
  total.set_wait(total.wait() + more.wait());
  total.set_pull(total.pull() + more.pull());
  total.set_other(total.other() + more.other());
}

double SumOf(const v1::StepTimes& times) {
  return times.forward() + times.backward() + times.push() + times.wait() + times.pull() + times.other();
}

}  // namespace

void RecentRate::Add(double unix_s, double total) {
  if (!totals_.empty() && (unix_s <= totals_.back().first || total < totals_.back().second)) {
    if (total < totals_.back().second) Restart();
    if (!totals_.empty()) return;
  }
  totals_.emplace_back(unix_s, total);
  while (totals_.size() > 2 && totals_[1].first <= unix_s - kRateOver_s) totals_.pop_front();
}

double RecentRate::per_s() const {
  if (totals_.size() < 2) return 0;
  return (totals_.back().second - totals_.front().second) / (totals_.back().first - totals_.front().first);
}

void RecentMedian::Add(double value) {
  if (values_.size() < kMedianOf) {
    values_.push_back(value);
    return;
  }
  values_[next_] = value;
  next_ = (next_ + 1) % kMedianOf;
}

double RecentMedian::median() const {
  if (values_.empty()) return 0;
  std::vector<double> sorted = values_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

bool RunRecord::gathers() const {
  return mode_ == "bsp" || mode_ == "backup" || mode_ == "local_sgd" || mode_ == "diloco";
}

uint64_t RunRecord::live_workers() const {
  return static_cast<uint64_t>(
      std::count_if(workers_.begin(), workers_.end(), [](const auto& each) { return !each.second.done; }));
}

void RunRecord::Add(const std::string& source, double unix_s, const json& line) {
  const std::string event = TextOf(line, "event");
  const bool of_worker = line.contains("rank");
  const uint64_t number = CountOf(line, of_worker ? "rank" : "shard", UINT64_MAX);
  if (number > kMaxRank) {
    if (unknown_.size() < kMaxSaid && unknown_.insert(source).second) {
      AddProblem(unix_s, absl::StrCat(source, ": a line says of no worker and no server"));
    }
    return;
  }
  if (!(unix_s > newest_unix_s_)) unix_s = newest_unix_s_;
  CatchUp(unix_s);
  newest_unix_s_ = unix_s;
  if (event == "start") NoteVersion(source, unix_s, line);
  if (event == "dropped") {
    AddProblem(unix_s, absl::StrCat(source, ": ", CountOf(line, "lines"), " lines were dropped here"));
    return;
  }
  if (of_worker) {
    AddOfWorker(source, event, static_cast<uint32_t>(number), unix_s, line);
  } else {
    AddOfServer(event, static_cast<uint32_t>(number), unix_s, line);
  }
  static const std::set<std::string> known = {"start", "step", "eval", "rollback", "rejoin",    "end",
                                              "apply", "set",  "runs", "run",      "optimizer", "checkpoint"};
  if (known.contains(event) || unknown_.size() >= kMaxSaid || !unknown_.insert(event).second) return;
  AddProblem(unix_s, absl::StrCat(source, ": this program knows no events '", event, "'; they are passed over"));
}

void RunRecord::NoteVersion(const std::string& source, double unix_s, const json& line) {
  const std::string version = TextOf(line, "program_version");
  if (version.empty() || version == kVersion || versions_.size() >= kMaxSaid || !versions_.insert(version).second) {
    return;
  }
  AddProblem(unix_s, absl::StrCat(source, ": written by version ", version, "; this program is version ", kVersion,
                                  ", and what it does not know is passed over"));
}

void RunRecord::NoteGeneration(const json& line) {
  const uint64_t generation = CountOf(line, "generation");
  if (generation <= generation_) return;
  if (generation_ != 0) {
    ++rollbacks_;
    for (auto& [rank, worker] : workers_) worker.step_ended_unix_s.reset();
    arrivals_.clear();
    steps_per_s_.Restart();
    phase_ = batches_ > 0 ? v1::PHASE_RUNNING : v1::PHASE_GATHERING;
  }
  generation_ = generation;
}

// ---- Workers

void RunRecord::AddOfWorker(const std::string& source, const std::string& event, uint32_t rank, double unix_s,
                            const json& line) {
  Worker& worker = workers_[rank];
  worker.last_line_unix_s = unix_s;
  if (event == "start") AddWorkerStart(worker, source, line);
  if (event == "step") AddStep(worker, rank, unix_s, line);
  if (event == "eval") AddEvaluation(line);
  if (event == "rejoin") {
    worker.incarnation = std::max(worker.incarnation + 1, CountOf(line, "incarnation"));
    worker.step_ended_unix_s.reset();
  }
  if (event == "rollback") {
    NoteGeneration(line);
    // The first who says it, of several workers who go back to the same step.
    if (std::exchange(stepped_back_in_, generation_) != generation_) step_ = CountOf(line, "step");
  }
  if (event == "end") {
    worker.done = true;
    worker.step_ended_unix_s.reset();
    // Without the chief's word.
    if ((servers_.empty() || servers_.begin()->second.ended) && phase_ == v1::PHASE_RUNNING && live_workers() == 0)
      phase_ = v1::PHASE_FINISHED;
  }
}

void RunRecord::AddWorkerStart(Worker& worker, const std::string& source, const json& line) {
  worker.incarnation = std::max(worker.incarnation + 1, CountOf(line, "incarnation"));
  worker.source = source;
  worker.name = TextOf(FlagsOf(line), "name");
  worker.host = TextOf(line, "host");
  worker.device = TextOf(line, "device");
  worker.steps = worker.samples = 0;
  worker.seconds.Clear();
  worker.steps_per_s.Restart();
  worker.step_ended_unix_s.reset();
  worker.done = false;
  if (mode_.empty()) mode_ = ModeOf(line);
  if (job_.empty()) job_ = TextOf(FlagsOf(line), "job");
  num_workers_ = std::max({num_workers_, static_cast<uint32_t>(std::min<uint64_t>(CountOf(line, "workers"), kMaxRank)),
                           static_cast<uint32_t>(workers_.size())});
  NoteGeneration(line);
}

void RunRecord::AddStep(Worker& worker, uint32_t rank, double unix_s, const json& line) {
  v1::SlowStep step;
  step.set_step(CountOf(line, "step"));
  step.set_unix_ms(UnixMs(unix_s));
  v1::StepTimes& times = *step.mutable_times();
  times.set_forward(SecondsIn(line, "forward_s"));
  times.set_backward(SecondsIn(line, "backward_s"));
  times.set_push(SecondsIn(line, "push_s"));
  times.set_wait(SecondsIn(line, "wait_s"));
  times.set_pull(SecondsIn(line, "pull_s"));
  times.set_other(SecondsIn(line, "idle_s"));
  const double known = SumOf(times);
  if (worker.step_ended_unix_s.has_value()) {
    step.set_seconds(std::max(unix_s - *worker.step_ended_unix_s, 0.0));
    if (step.seconds() > known) times.set_other(times.other() + step.seconds() - known);
    step_s_.Add(step.seconds());
    AddSlowest(rank, step);
  }
  if (batches_ == 0) {
    began_unix_s_ = looked_unix_s_ = unix_s - known;
    steps_per_s_.Add(began_unix_s_, 0);
    samples_per_s_.Add(began_unix_s_, 0);
  }
  if (worker.steps == 0) worker.steps_per_s.Add(unix_s - known, 0);
  if (phase_ == v1::PHASE_GATHERING || servers_.empty()) phase_ = v1::PHASE_RUNNING;
  const uint64_t samples = std::min<uint64_t>(CountOf(line, "samples"), uint64_t{1} << 40);
  worker.step_ended_unix_s = progressed_unix_s_ = unix_s;
  worker.step = step.step() + 1;
  worker.version = CountOf(line, "version");
  ++worker.steps;
  worker.samples += samples;
  AddTimes(worker.seconds, times);
  ++batches_;
  samples_ += samples;
  step_ = std::max(step_, worker.step);
  if (const auto found = servers_.find(0); found != servers_.end() && SaysStale(line)) {
    v1::ShardStatusReply& chief = found->second.status;
    chief.set_stale(chief.stale() + 1);
    chief.set_dropped_samples(chief.dropped_samples() + samples);
  }
  if (gathers()) NoteArrival(rank, step.step(), unix_s - times.pull() - times.wait());
  if (!line.contains("loss")) return;
  const double loss = NumberOf(line, "loss");
  const double weight = std::max<double>(1, static_cast<double>(samples));
  AddLoss(loss_, loss_weight_, loss, weight);
  if (!worker.new_loss) worker.loss.Clear();
  worker.new_loss = true;
  double of_worker = static_cast<double>(worker.loss.batches()) * weight;
  AddLoss(worker.loss, of_worker, loss, weight);
}

void RunRecord::NoteArrival(uint32_t rank, uint64_t step, double pushed_unix_s) {
  Arrivals& arrivals = arrivals_[step];
  ++arrivals.count;
  if (arrivals.count == 1 || pushed_unix_s >= arrivals.last) {
    arrivals.before = arrivals.count == 1 ? pushed_unix_s : arrivals.last;
    arrivals.last = pushed_unix_s;
    arrivals.rank = rank;
  } else {
    arrivals.before = arrivals.count == 2 ? pushed_unix_s : std::max(arrivals.before, pushed_unix_s);
  }
  if (arrivals.count > 1 && arrivals.count == live_workers()) {
    workers_[arrivals.rank].held_up_s += arrivals.last - arrivals.before;
    arrivals_.erase(step);
  }
  if (arrivals_.size() > kMaxArrivals) arrivals_.erase(arrivals_.begin());
}

void RunRecord::AddSlowest(uint32_t rank, const v1::SlowStep& step) {
  if (slowest_.size() == kMaxSlowest && step.seconds() <= slowest_.back().step().seconds()) return;
  v1::SlowestStep slowest;
  slowest.set_rank(rank);
  *slowest.mutable_step() = step;
  const auto place =
      std::upper_bound(slowest_.begin(), slowest_.end(), step.seconds(),
                       [](double seconds, const v1::SlowestStep& each) { return seconds > each.step().seconds(); });
  slowest_.insert(place, std::move(slowest));
  if (slowest_.size() > kMaxSlowest) slowest_.pop_back();
}

void RunRecord::AddEvaluation(const json& line) {
  v1::Evaluation evaluation;
  evaluation.set_split(TextOf(line, "split"));
  evaluation.set_step(CountOf(line, "step"));
  evaluation.set_version(CountOf(line, "version"));
  evaluation.set_loss(NumberOf(line, "loss", std::numeric_limits<double>::quiet_NaN()));
  if (line.contains("accuracy")) evaluation.set_accuracy(NumberOf(line, "accuracy"));
  const auto found = evaluations_.find(evaluation.split());
  if (found == evaluations_.end() && evaluations_.size() == kMaxSplits) return;
  const bool first = found == evaluations_.end();
  evaluations_[evaluation.split()] = evaluation;
  // Two of the same moment are both told.
  if (!first) Look(newest_unix_s_);
}

// ---- Servers

void RunRecord::AddOfServer(const std::string& event, uint32_t shard, double unix_s, const json& line) {
  Server& server = servers_[shard];
  server.status.set_shard(shard);
  if (event == "start") AddServerStart(server, line);
  if (event == "apply") AddApply(server, unix_s, line);
  if (event == "checkpoint") AddCheckpoint(unix_s, line);
  if (event == "set") {
    const auto values = line.find("values");
    if (values != line.end() && values->is_object() && shard == 0) {
      for (const auto& [name, value] : values->items()) {
        if (value.is_number() && hyperparameters_.size() < 100) hyperparameters_[name] = value.get<float>();
      }
    }
  }
  if (event != "end") return;
  server.ended = true;
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  if (v1::Phase_Parse(TextOf(line, "phase"), &phase) && shard == 0) phase_ = phase;
  if (phase_ == v1::PHASE_RUNNING && live_workers() == 0 && !line.contains("rolled_back")) phase_ = v1::PHASE_FINISHED;
}

void RunRecord::AddServerStart(Server& server, const json& line) {
  server.host = TextOf(line, "host");
  server.ended = false;
  const json& flags = FlagsOf(line);
  if (const std::string mode = ModeOf(line.contains("mode") ? line : flags); !mode.empty()) mode_ = mode;
  job_ = TextOf(flags, "job");
  optimizer_ = TextOf(flags, "optimizer");
  num_workers_ = std::max<uint32_t>(num_workers_, static_cast<uint32_t>(FlagNumber(line, "num_workers")));
  num_shards_ = static_cast<uint32_t>(std::max<uint64_t>(FlagNumber(line, "num_shards"), servers_.size()));
  float rate = 0;
  if (absl::SimpleAtof(TextOf(flags, "learning_rate"), &rate)) hyperparameters_["learning_rate"] = rate;
  NoteGeneration(line);
}

void RunRecord::AddApply(Server& server, double unix_s, const json& line) {
  v1::ShardStatusReply& status = server.status;
  status.set_version(CountOf(line, "version"));
  status.set_updates(status.updates() + 1);
  status.set_applied(status.applied() + CountOf(line, "contributions"));
  const auto samples = line.find("samples");
  if (samples != line.end() && samples->is_array()) {
    for (const json& each : *samples) {
      if (each.is_number_unsigned()) status.set_applied_samples(status.applied_samples() + each.get<uint64_t>());
    }
  }
  const auto staleness = line.find("staleness");
  if (staleness != line.end() && staleness->is_array()) {
    for (const json& each : *staleness) {
      if (each.is_number()) server.staleness.Add(each.get<double>());
    }
  }
  server.apply_seconds.Add(SecondsIn(line, "apply_s"));
  status.set_learning_rate(static_cast<float>(NumberOf(line, "learning_rate")));
  status.set_position(CountOf(line, "position"));
  status.set_last_update_unix_ms(UnixMs(unix_s));
  server.applied_unix_s = unix_s;
  if (phase_ == v1::PHASE_GATHERING && batches_ > 0) phase_ = v1::PHASE_RUNNING;
}

void RunRecord::AddCheckpoint(double unix_s, const json& line) {
  if (!checkpoint_.has_value()) checkpoint_.emplace();
  checkpoint_->set_failure(TextOf(line, "failure"));
  if (!checkpoint_->failure().empty()) {
    ++checkpoint_failures_;
    return;
  }
  checkpoint_->set_path(absl::StrCat("checkpoint ", CountOf(line, "number")));
  checkpoint_->set_version(CountOf(line, "version"));
  checkpoint_unix_s_ = unix_s;
}

// ---- Looking at it

void RunRecord::CatchUp(double unix_s) {
  if (batches_ == 0) return;
  if (unix_s - loss_since_unix_s_ >= kLossEvery_s) {
    FlushLoss(newest_unix_s_);
    loss_since_unix_s_ = unix_s;
  }
  const double every = looked_unix_s_ - began_unix_s_ < kFinelyFor_s ? 0.25 : 1;
  for (int looks = 0; looks < kMaxLooks && looked_unix_s_ + every <= unix_s; ++looks) Look(looked_unix_s_ + every);
  if (looked_unix_s_ + every <= unix_s) Look(unix_s);
}

void RunRecord::FlushLoss(double unix_s) {
  if (loss_.batches() == 0) return;
  history_.AddObservation("loss", {.t = std::max(unix_s - began_unix_s_, 0.0),
                                   .steps = step_,
                                   .samples = samples_,
                                   .mean = loss_.mean(),
                                   .least = loss_.least(),
                                   .largest = loss_.largest(),
                                   .weight = static_cast<double>(loss_.batches())});
  last_loss_ = loss_;
  loss_.Clear();
  loss_weight_ = 0;
}

void RunRecord::Look(double now_unix_s) {
  status_unix_s_ = std::max(status_unix_s_, now_unix_s);
  // The curves of a run that was killed end a little after it.
  now_unix_s = std::max(std::min(now_unix_s, newest_unix_s_ + kQuietFor_s), looked_unix_s_);
  FlushLoss(std::min(now_unix_s, newest_unix_s_));
  looked_unix_s_ = now_unix_s;
  if (!ended()) {
    steps_per_s_.Add(now_unix_s, static_cast<double>(gathers() ? step_ : batches_));
    samples_per_s_.Add(now_unix_s, static_cast<double>(samples_));
  }
  for (auto& [rank, worker] : workers_) {
    if (!worker.done) worker.steps_per_s.Add(now_unix_s, static_cast<double>(worker.steps));
    worker.new_loss = false;
  }
  v1::StatusReply snapshot = Snapshot(now_unix_s);
  snapshot.mutable_progress()->clear_loss();  // History has it, as fine as the files have it.
  history_.Observe(snapshot, now_unix_s);
}

v1::StatusReply RunRecord::Status() const {
  return Snapshot(ended() ? looked_unix_s_ : std::max(status_unix_s_, looked_unix_s_));
}

v1::StatusReply RunRecord::Snapshot(double unix_s) const {
  v1::StatusReply status;
  status.set_job(job_.empty() ? name_ : job_);
  status.set_generation(generation_);
  status.set_phase(phase_);
  status.set_failure(failure_);
  status.set_num_workers(num_workers_);
  status.set_num_shards(num_shards_);
  (*status.mutable_settings())["mode"] = mode_;
  (*status.mutable_settings())["optimizer"] = optimizer_;
  for (const auto& [name, value] : hyperparameters_) {
    v1::Hyperparameter* const message = status.add_hyperparameters();
    message->set_name(name);
    message->set_value(value);
  }
  std::vector<double> rates;
  for (const auto& [rank, worker] : workers_) {
    if (!worker.done) rates.push_back(worker.steps_per_s.per_s());
  }
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  if (!rates.empty()) std::nth_element(rates.begin(), middle, rates.end());
  for (const auto& [rank, worker] : workers_) {
    v1::WorkerStatus* const message = status.add_workers();
    message->set_rank(rank);
    message->set_incarnation(worker.incarnation);
    message->set_name(worker.name);
    message->set_host(worker.host);
    message->set_step(worker.step);
    message->set_done(worker.done);
    message->set_last_heard_ms(static_cast<uint64_t>(std::max(unix_s - worker.last_line_unix_s, 0.0) * 1000));
    message->set_held_up_s(worker.held_up_s);
    message->set_steps_per_s(worker.done ? 0 : worker.steps_per_s.per_s());
    const bool alone = mode_ == "asp" || mode_ == "easgd";
    message->set_slow(alone && !worker.done && rates.size() > 1 && *middle > 0 && worker.steps > 0 &&
                      worker.steps_per_s.per_s() < *middle / 2);
    v1::WorkerReport& report = *message->mutable_report();
    report.set_steps(worker.steps);
    report.set_samples(worker.samples);
    report.set_device(worker.device);
    *report.mutable_seconds() = worker.seconds;
    if (worker.loss.batches() > 0) *report.mutable_loss() = worker.loss;
  }
  for (const auto& [shard, server] : servers_) {
    v1::ShardInfo* const info = status.add_shards();
    info->set_shard(shard);
    info->set_address(server.host);
    v1::ShardStatusReply& message = *status.add_shard_status();
    message = server.status;
    server.apply_seconds.AddTo(*message.mutable_apply_seconds());
    server.staleness.AddTo(*message.mutable_staleness());
  }
  if (checkpoint_.has_value()) {
    *status.mutable_checkpoints() = *checkpoint_;
    status.mutable_checkpoints()->set_age_ms(static_cast<uint64_t>(std::max(unix_s - checkpoint_unix_s_, 0.0) * 1000));
  }
  v1::ProgressStatus& progress = *status.mutable_progress();
  progress.set_step(step_);
  progress.set_samples(samples_);
  progress.set_steps_per_s(ended() ? 0 : steps_per_s_.per_s());
  progress.set_samples_per_s(ended() ? 0 : samples_per_s_.per_s());
  progress.set_median_step_s(step_s_.median());
  if (last_loss_.batches() > 0) *progress.mutable_loss() = last_loss_;
  for (const auto& [split, evaluation] : evaluations_) *progress.add_evaluations() = evaluation;
  const double running_until = ended() ? newest_unix_s_ : unix_s;
  progress.set_running_s(batches_ == 0 ? 0 : std::max(running_until - began_unix_s_, 0.0));
  progress.set_since_version_s(batches_ == 0 ? 0 : std::max(unix_s - progressed_unix_s_, 0.0));
  if (phase_ == v1::PHASE_RUNNING &&
      progress.since_version_s() > std::max(kStuckAfter_s, kStuckMedians * progress.median_step_s())) {
    progress.set_stuck(absl::StrCat("no step is written for ", Spoken(progress.since_version_s())));
  }
  progress.set_rollbacks(rollbacks_);
  progress.set_checkpoint_failures(checkpoint_failures_);
  for (const v1::SlowestStep& each : slowest_) *progress.add_slowest() = each;
  progress.set_unix_ms(UnixMs(unix_s));
  return status;
}

}  // namespace ps
