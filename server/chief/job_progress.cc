#include "server/chief/job_progress.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/text.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kLookEvery(1);
constexpr std::chrono::seconds kRateTime(10);
constexpr std::chrono::seconds kKnownEnough(5);  // A rank's rate says something once it is known for so long.
constexpr std::chrono::seconds kStuckMin(10);
constexpr double kStuckSteps = 10;
constexpr double kSlowShare = 0.5;    // Of the median rank's rate.
constexpr size_t kMedianSteps = 101;  // It is the median of so many.
constexpr size_t kMaxSlowest = 32;
constexpr int kMaxSlowestOfReport = 4;
constexpr size_t kMaxSplits = 8;
constexpr std::chrono::seconds kLossTime(10);      // What was told so long before the newest is not the job's loss.
constexpr double kLossSteps = 3;                   // Unless a step takes that long.
constexpr uint64_t kMaxCount = uint64_t{1} << 53;  // What readers of JSON can tell from its neighbours.
constexpr size_t kMaxWordBytes = 64;               // The name of a device, a link or a split is no longer.

double NotNegative(double seconds) { return std::isfinite(seconds) && seconds > 0 ? seconds : 0; }

// Totals grow, and a sum of them is a number.
void PutRightCounts(const v1::WorkerReport& before, v1::WorkerReport& report) {
  const auto grown = [](uint64_t before, uint64_t now) { return std::max(before, std::min(now, kMaxCount)); };
  report.set_steps(grown(before.steps(), report.steps()));
  report.set_samples(grown(before.samples(), report.samples()));
  report.set_sent_bytes(grown(before.sent_bytes(), report.sent_bytes()));
  report.set_received_bytes(grown(before.received_bytes(), report.received_bytes()));
  report.set_dropped_reports(grown(before.dropped_reports(), report.dropped_reports()));
  report.set_all_steps(std::min(report.all_steps(), kMaxCount));
}

void PutRight(v1::StepTimes& times) {
  times.set_forward(NotNegative(times.forward()));
  times.set_backward(NotNegative(times.backward()));
  times.set_push(NotNegative(times.push()));
  times.set_wait(NotNegative(times.wait()));
  times.set_pull(NotNegative(times.pull()));
  times.set_other(NotNegative(times.other()));
}

// Batches of both. A mean that is not a number stays one; the range is of the numbers.
v1::LossRange Together(const v1::LossRange& one, const v1::LossRange& other) {
  const uint64_t batches = one.batches() + other.batches();
  v1::LossRange both;
  both.set_batches(batches);
  const double share = static_cast<double>(other.batches()) / static_cast<double>(std::max<uint64_t>(batches, 1));
  both.set_mean(one.mean() * (1 - share) + other.mean() * share);
  both.set_least(std::fmin(one.least(), other.least()));
  both.set_largest(std::fmax(one.largest(), other.largest()));
  return both;
}

double Middle(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto upper = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), upper, values.end());
  return values.size() % 2 == 1 ? *upper : (*std::max_element(values.begin(), upper) + *upper) / 2;
}

}  // namespace

// ---- Rates

void GrowthRate::Add(uint64_t total, TimePoint now) {
  points_[next_] = {.at = now, .total = total};
  next_ = (next_ + 1) % kKept;
  size_ = std::min(size_ + 1, kKept);
}

double GrowthRate::PerSecond(uint64_t total, TimePoint now) const {
  if (size_ == 0 || now <= oldest().at || total < oldest().total) return 0;
  return static_cast<double>(total - oldest().total) / Seconds(now - oldest().at);
}

std::chrono::nanoseconds GrowthRate::Span(TimePoint now) const {
  if (size_ == 0) return std::chrono::nanoseconds(0);
  return std::min<std::chrono::nanoseconds>(now - oldest().at, kRateTime);
}

// ---- Events

JobProgress::Terms JobProgress::TermsOf(const Mode& mode) {
  return {.synchronous = mode.synchronous(),
          .ranks_wait = mode.ranks_wait(),
          .takes_rounds = mode.policy().has_local_steps()};
}

void JobProgress::OnRunning(uint64_t version, uint64_t samples, TimePoint now) {
  running_since_ = last_version_ = now;
  version_ = version;
  first_samples_ = samples;
  versions_.Add(version_, now);
  samples_.Add(Samples(), now);
}

void JobProgress::OnVersion(uint64_t version, TimePoint now) {
  if (!running_since_.has_value() || version <= version_) return;
  // The first one has waited for whatever comes before it.
  if (std::exchange(has_version_, true)) {
    steps_.push_back(Seconds(now - last_version_) / static_cast<double>(version - version_));
    if (steps_.size() > kMedianSteps) steps_.pop_front();
  }
  version_ = version;
  last_version_ = now;
}

JobProgress::Worker& JobProgress::WorkerOf(const Member& member) {
  Worker& worker = workers_[member.rank];
  if (worker.incarnation == member.incarnation) return worker;
  Leave(worker);
  return worker = {.incarnation = member.incarnation, .report = {}, .loss = {}, .loss_at = {}, .steps = {}};
}

void JobProgress::Leave(const Worker& worker) {
  if (!worker.report.has_value()) return;
  left_samples_ += worker.report->samples();
  counts_.dropped_reports += worker.report->dropped_reports();
}

void JobProgress::OnReport(const Member& member, const v1::WorkerReport& told, TimePoint now) {
  Worker& worker = WorkerOf(member);
  if (worker.report.has_value() && told.number() <= worker.report->number()) return;
  if (!worker.report.has_value()) worker.steps = {};  // It was of what is counted otherwise.
  const v1::WorkerReport before = worker.report.value_or(v1::WorkerReport());
  v1::WorkerReport& report = worker.report.emplace(told);
  report.DiscardUnknownFields();
  PutRightCounts(before, report);
  if (report.steps() > before.steps()) OnBatches(now);
  report.set_link(Printable(report.link(), kMaxWordBytes));
  report.set_device(Printable(report.device(), kMaxWordBytes));
  if (report.has_seconds()) PutRight(*report.mutable_seconds());
  if (report.has_loss()) {
    worker.loss = report.loss();
    worker.loss_at = now;
  }
  for (v1::Evaluation* const evaluation : {report.mutable_evaluation(), report.mutable_other_evaluation()}) {
    if (evaluation->split().empty()) continue;
    evaluation->set_split(Printable(evaluation->split(), kMaxWordBytes));
    evaluation->set_step(std::min(evaluation->step(), kMaxCount));
    evaluation->set_version(std::min(evaluation->version(), kMaxCount));
    evaluation->set_samples(std::min(evaluation->samples(), kMaxCount));
    if (!(evaluation->accuracy() >= 0 && evaluation->accuracy() <= 1)) evaluation->clear_accuracy();
    const auto known = evaluations_.find(evaluation->split());
    if (known == evaluations_.end() && evaluations_.size() >= kMaxSplits) continue;
    if (known != evaluations_.end() && known->second.step() > evaluation->step()) continue;
    evaluations_[evaluation->split()] = *evaluation;
  }
  if (report.evaluation().split().empty()) report.clear_evaluation();
  if (report.other_evaluation().split().empty()) report.clear_other_evaluation();
  AddSlowest(member.rank, report);
  report.clear_slowest();
}

void JobProgress::AddSlowest(uint32_t rank, const v1::WorkerReport& report) {
  for (int i = 0; i < std::min(report.slowest_size(), kMaxSlowestOfReport); ++i) {
    // A report whose answer was lost is told again, with the next one.
    const bool known = std::any_of(slowest_.begin(), slowest_.end(), [&](const v1::SlowestStep& each) {
      return each.rank() == rank && each.step().step() == report.slowest(i).step() &&
             each.step().unix_ms() == report.slowest(i).unix_ms();
    });
    if (known) continue;
    v1::SlowestStep step;
    step.set_rank(rank);
    *step.mutable_step() = report.slowest(i);
    step.mutable_step()->set_seconds(NotNegative(step.step().seconds()));
    step.mutable_step()->set_step(std::min(step.step().step(), kMaxCount));
    step.mutable_step()->set_unix_ms(std::min(step.step().unix_ms(), kMaxCount));
    PutRight(*step.mutable_step()->mutable_times());
    const auto place = std::find_if(slowest_.begin(), slowest_.end(), [&](const v1::SlowestStep& each) {
      return each.step().seconds() < step.step().seconds();
    });
    slowest_.insert(place, std::move(step));
  }
  if (slowest_.size() > kMaxSlowest) slowest_.resize(kMaxSlowest);
}

void JobProgress::OnShardStatus(v1::ShardStatusReply status) {
  const uint32_t shard = status.shard();
  shards_[shard] = std::move(status);
}

void JobProgress::Look(const Membership& members, TimePoint now) {
  if (now - looked_ < kLookEvery || ended_at_.has_value()) return;
  looked_ = now;
  if (const auto loss = Loss(); loss.has_value()) last_loss_ = loss;
  last_all_steps_ = AllSteps();
  std::erase_if(workers_, [&](const auto& entry) {
    const auto member = members.members().find(entry.first);
    if (member != members.members().end() && member->second.incarnation == entry.second.incarnation) return false;
    Leave(entry.second);
    return true;
  });
  for (const auto& [rank, member] : members.members()) {
    if (!member.begun) continue;
    Worker& worker = WorkerOf(member);
    worker.steps.Add(StepsOf(worker, member), now);
  }
  if (!running_since_.has_value()) return;
  highest_steps_.Add(highest_step_, now);
  versions_.Add(version_, now);
  samples_.Add(Samples(), now);
  FindSlow(members, now);
}

void JobProgress::Extend(std::chrono::nanoseconds gap, TimePoint now) {
  last_version_ = std::min(last_version_ + gap, now);
  waits_ = {};
}

void JobProgress::FindSlow(const Membership& members, TimePoint now) {
  slow_.clear();
  if (terms_.ranks_wait) return;
  std::map<uint32_t, double> rates;
  for (const auto& [rank, member] : members.members()) {
    const auto worker = workers_.find(rank);
    if (member.done || worker == workers_.end() || worker->second.steps.Span(now) < kKnownEnough) continue;
    rates[rank] = RateOf(member, now);
  }
  if (rates.size() < 2) return;
  std::vector<double> values;
  values.reserve(rates.size());
  for (const auto& [rank, rate] : rates) values.push_back(rate);
  const double limit = kSlowShare * Middle(std::move(values));
  for (const auto& [rank, rate] : rates) {
    if (rate < limit) slow_.insert(rank);
  }
}

// ---- What is known

uint64_t JobProgress::StepsOf(const Worker& worker, const Member& member) {
  if (worker.report.has_value()) return worker.report->steps();
  return member.local_steps > 0 ? member.local_steps : member.step;
}

double JobProgress::RateOf(const Member& member, TimePoint now) const {
  const auto worker = workers_.find(member.rank);
  if (worker == workers_.end() || worker->second.incarnation != member.incarnation) return 0;
  return worker->second.steps.PerSecond(StepsOf(worker->second, member), now);
}

uint64_t JobProgress::Samples() const {
  uint64_t samples = left_samples_;
  for (const auto& [rank, worker] : workers_) samples += worker.report.has_value() ? worker.report->samples() : 0;
  // Workers that tell nothing, or have told nothing yet, still push.
  const uint64_t pushed =
      shards_.empty() ? 0 : shards_.begin()->second.applied_samples() + shards_.begin()->second.dropped_samples();
  return first_samples_ + std::max(samples, pushed);
}

uint64_t JobProgress::AllSteps() const {
  uint64_t all = 0;
  for (const auto& [rank, worker] : workers_) {
    if (worker.report.has_value()) all = std::max(all, worker.report->all_steps());
  }
  return all > 0 ? all : last_all_steps_;
}

std::optional<v1::LossRange> JobProgress::Loss() const {
  const double fresh_s = std::max(Seconds(kLossTime), kLossSteps * MedianStep());
  TimePoint newest;
  for (const auto& [rank, worker] : workers_) {
    if (worker.loss.has_value()) newest = std::max(newest, worker.loss_at);
  }
  std::optional<v1::LossRange> loss;
  for (const auto& [rank, worker] : workers_) {
    if (!worker.loss.has_value() || Seconds(newest - worker.loss_at) > fresh_s) continue;
    loss = loss.has_value() ? Together(*loss, *worker.loss) : *worker.loss;
  }
  return loss.has_value() ? loss : last_loss_;
}

double JobProgress::LeftSeconds(const Membership& members, TimePoint now) const {
  const auto time = [](uint64_t all, uint64_t made, double rate) {
    return all > made && rate > 0 ? static_cast<double>(all - made) / rate : 0;
  };
  if (terms_.synchronous) return time(AllSteps(), version_, versions_.PerSecond(version_, now));
  if (terms_.takes_rounds) return time(AllSteps(), highest_step_, highest_steps_.PerSecond(highest_step_, now));
  // Each goes on by itself, and the job is done when the last one is.
  double left = 0;
  for (const auto& [rank, member] : members.members()) {
    const auto worker = workers_.find(rank);
    if (member.done || worker == workers_.end() || !worker->second.report.has_value()) continue;
    const v1::WorkerReport& report = *worker->second.report;
    left = std::max(left, time(report.all_steps(), member.start_step + report.steps(), RateOf(member, now)));
  }
  return left;
}

double JobProgress::MedianStep() const { return Middle({steps_.begin(), steps_.end()}); }

std::optional<std::chrono::nanoseconds> JobProgress::StuckFor(TimePoint now) const {
  if (!running_since_.has_value()) return std::nullopt;
  // In a long round workers say how far they are.
  const TimePoint since = terms_.takes_rounds ? std::max(last_version_, last_batches_) : last_version_;
  if (now - since <= kStuckMin || Seconds(now - since) <= kStuckSteps * MedianStep()) return std::nullopt;
  return now - last_version_;
}

JobCounts JobProgress::counts() const {
  JobCounts counts = counts_;
  for (const auto& [rank, worker] : workers_) {
    if (worker.report.has_value()) counts.dropped_reports += worker.report->dropped_reports();
  }
  return counts;
}

void JobProgress::Fill(const Membership& members, TimePoint now, v1::ProgressStatus& progress) const {
  now = std::min(now, ended_at_.value_or(now));  // What it was at its end, it stays.
  const JobCounts all = counts();
  progress.set_rollbacks(all.rollbacks);
  progress.set_worker_losses(all.worker_losses);
  progress.set_checkpoint_failures(all.checkpoint_failures);
  progress.set_dropped_reports(all.dropped_reports);
  progress.set_step(terms_.synchronous ? version_ : highest_step_);
  progress.set_all_steps(AllSteps());
  progress.set_samples(Samples());
  if (const auto loss = Loss(); loss.has_value()) *progress.mutable_loss() = *loss;
  for (const auto& [split, evaluation] : evaluations_) *progress.add_evaluations() = evaluation;
  progress.mutable_slowest()->Add(slowest_.begin(), slowest_.end());
  if (!running_since_.has_value()) return;
  progress.set_steps_per_s(versions_.PerSecond(version_, now));
  progress.set_samples_per_s(samples_.PerSecond(Samples(), now));
  progress.set_left_s(LeftSeconds(members, now));
  progress.set_median_step_s(MedianStep());
  // Another thread may have told of a version since `now`.
  progress.set_since_version_s(std::max(0.0, Seconds(now - last_version_)));
  progress.set_running_s(Seconds(now - *running_since_));
}

std::map<uint32_t, double> JobProgress::HeldUp() const {
  std::map<uint32_t, double> most;
  for (const auto& [shard, status] : shards_) {
    for (const v1::RankSeconds& held : status.held_up()) {
      most[held.rank()] = std::max(most[held.rank()], held.seconds());
    }
  }
  return most;
}

void JobProgress::FillWorker(const Member& member, TimePoint now, v1::WorkerStatus& status) const {
  now = std::min(now, ended_at_.value_or(now));
  status.set_busy_with(member.busy_with);
  const auto worker = workers_.find(member.rank);
  if (worker == workers_.end() || worker->second.incarnation != member.incarnation) return;
  status.set_steps_per_s(RateOf(member, now));
  status.set_slow(slow_.contains(member.rank));
  if (!worker->second.report.has_value()) return;
  *status.mutable_report() = *worker->second.report;
  if (worker->second.loss.has_value()) *status.mutable_report()->mutable_loss() = *worker->second.loss;
}

}  // namespace ps
