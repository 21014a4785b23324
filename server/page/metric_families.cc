#include "server/page/metric_families.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

#include <prometheus/text_serializer.h>
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/distribution.h"
#include "common/program.h"
#include "common/text.h"

namespace ps {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr double kMillisecond = 1e-3;

// The families in the order in which they were begun; those to which nothing was added are left out.
class Families {
 public:
  // The metrics that are added next are of this family.
  void Begin(const char* name, MetricType type, const char* help) {
    End();
    families_.push_back({.name = name, .help = help, .type = type});
  }
  void Gauge(const char* name, const char* help) { Begin(name, MetricType::Gauge, help); }
  void Counter(const char* name, const char* help) { Begin(name, MetricType::Counter, help); }

  void Add(double value, Labels labels = {}) {
    MetricFamily& family = families_.back();
    ClientMetric& metric = family.metric.emplace_back();
    metric.label = std::move(labels);
    (family.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  }
  void Add(const v1::Distribution& distribution, std::span<const double> bounds, Labels labels = {}) {
    ClientMetric& metric = families_.back().metric.emplace_back();
    metric.label = std::move(labels);
    const auto count_of = [&](size_t range) {
      return static_cast<int>(range) < distribution.counts_size() ? distribution.counts(static_cast<int>(range)) : 0;
    };
    uint64_t count = 0;
    for (size_t i = 0; i < bounds.size(); ++i) {
      count += count_of(i);
      metric.histogram.bucket.push_back({.cumulative_count = count, .upper_bound = bounds[i]});
    }
    count += count_of(bounds.size());
    metric.histogram.bucket.push_back(
        {.cumulative_count = count, .upper_bound = std::numeric_limits<double>::infinity()});
    metric.histogram.sample_count = count;
    metric.histogram.sample_sum = distribution.sum();
  }
  void Seconds(const char* name, const v1::Distribution& distribution, const char* help) {
    Begin(name, MetricType::Histogram, help);
    Add(distribution, kSecondsBounds);
  }

  std::vector<MetricFamily> Take() {
    End();
    return std::move(families_);
  }

 private:
  void End() {
    if (!families_.empty() && families_.back().metric.empty()) families_.pop_back();
  }
  std::vector<MetricFamily> families_;
};

// 0.1, and not 0.10000000149011612, which is the double of this float.
double AsDecimal(float value) {
  const std::string text = ExactText(value);
  double decimal = value;
  std::from_chars(text.data(), text.data() + text.size(), decimal);
  return decimal;
}

// PHASE_SHUT_DOWN is shut_down.
std::string PhaseLabel(v1::Phase phase) {
  std::string name = v1::Phase_Name(phase);
  absl::AsciiStrToLower(&name);
  return std::string(absl::StripPrefix(name, "phase_"));
}

std::string SettingOr(const PageSnapshot& snapshot, const std::string& flag, const std::string& otherwise) {
  if (!snapshot.job.has_value()) return otherwise;
  const auto found = snapshot.job->settings().find(flag);
  return found == snapshot.job->settings().end() ? otherwise : found->second;
}

void AddAbout(const PageFacts& facts, const PageSnapshot& snapshot, Families& families) {
  families.Gauge("ps_build_info", "The program; always 1.");
  families.Add(1, {{"version", kVersion}});
  families.Gauge("ps_job_info", "The job that this server works for, and which part of it; always 1.");
  families.Add(1, {{"job_name", facts.job},
                   {"shard", absl::StrCat(facts.shard)},
                   {"mode", facts.mode},
                   {"optimizer", SettingOr(snapshot, "optimizer", facts.optimizer)}});
}

// What a shard knows of itself.
void AddShard(const PageFacts& facts, const PageSnapshot& snapshot, Families& families) {
  const v1::ShardStatusReply& shard = snapshot.shard;
  families.Counter("ps_pushes_total", "Complete pushes that this server answered, by answer.");
  families.Add(static_cast<double>(shard.applied()), {{"answer", "applied"}});
  families.Add(static_cast<double>(shard.duplicate()), {{"answer", "duplicate"}});
  families.Add(static_cast<double>(shard.stale()), {{"answer", "stale"}});
  families.Add(static_cast<double>(shard.fenced()), {{"answer", "fenced"}});
  families.Counter("ps_samples_total", "Samples of pushes that went into a version, or that the mode refused.");
  families.Add(static_cast<double>(shard.applied_samples()), {{"outcome", "applied"}});
  families.Add(static_cast<double>(shard.dropped_samples()), {{"outcome", "dropped"}});
  families.Counter("ps_refused_calls_total", "Calls that this server answered with an error, by the error's name.");
  for (const v1::RefusedCalls& each : shard.refused_calls()) {
    families.Add(static_cast<double>(each.calls()), {{"code", each.code()}});
  }
  families.Counter("ps_updates_total", "Versions that this server made.");
  families.Add(static_cast<double>(shard.updates()));
  families.Gauge("ps_version", "The version of this server's weights.");
  families.Add(static_cast<double>(shard.version()));
  families.Gauge("ps_clock_gap_steps", "Steps between the rank that is farthest ahead and the one farthest behind.");
  families.Add(static_cast<double>(shard.clock_gap_steps()));
  families.Gauge("ps_learning_rate", "The learning rate that the next version is made with.");
  if (SettingOr(snapshot, "optimizer", facts.optimizer) != "local") families.Add(AsDecimal(shard.learning_rate()));
  families.Gauge("ps_last_update_timestamp_seconds", "When the last version was made, in Unix seconds.");
  if (shard.last_update_unix_ms() > 0) {
    families.Add(static_cast<double>(shard.last_update_unix_ms()) * kMillisecond);
  }
  families.Gauge("ps_checkpoint_last_success_timestamp_seconds",
                 "When this server's part of a checkpoint was last on disk, in Unix seconds.");
  if (shard.checkpoint_unix_ms() > 0) families.Add(static_cast<double>(shard.checkpoint_unix_ms()) * kMillisecond);
  families.Counter("ps_received_bytes_total", "Bytes of messages and of what they carry that came, by link.");
  for (const v1::LinkBytes& each : shard.links()) {
    families.Add(static_cast<double>(each.received()), {{"link", each.link()}});
  }
  families.Counter("ps_sent_bytes_total", "Bytes of messages and of what they carry that went out, by link.");
  for (const v1::LinkBytes& each : shard.links()) {
    families.Add(static_cast<double>(each.sent()), {{"link", each.link()}});
  }
}

void AddDistributions(const v1::ShardStatusReply& shard, Families& families) {
  families.Seconds("ps_push_seconds", shard.push_seconds(), "Time from a push's first slices to its last.");
  families.Seconds("ps_apply_seconds", shard.apply_seconds(),
                   "Time from the decision on a version until it was there.");
  families.Seconds("ps_checkpoint_seconds", shard.checkpoint_seconds(),
                   "Time to write this server's part of a checkpoint.");
  families.Begin("ps_wait_seconds", MetricType::Histogram, "Time for which calls were parked, by call.");
  families.Add(shard.push_wait_seconds(), kSecondsBounds, {{"call", "push"}});
  families.Add(shard.pull_wait_seconds(), kSecondsBounds, {{"call", "pull"}});
  families.Begin("ps_staleness_versions", MetricType::Histogram,
                 "Versions between the one that a push was computed on and the one that it went into.");
  families.Add(shard.staleness(), kStalenessBounds);
}

void AddLimits(const v1::ShardStatusReply& shard, Families& families) {
  families.Gauge("ps_inflight_bytes", "Bytes of gradients that this server holds.");
  families.Add(static_cast<double>(shard.inflight_bytes()));
  families.Gauge("ps_inflight_limit_bytes", "The limit of ps_inflight_bytes.");
  families.Add(static_cast<double>(shard.inflight_bytes_max()));
  families.Gauge("ps_parked_calls", "Calls that wait for an answer.");
  families.Add(shard.parked());
  families.Gauge("ps_parked_calls_limit", "The limit of ps_parked_calls.");
  families.Add(shard.parked_max());
  families.Gauge("ps_version_buffers", "Versions of the weights that exist now.");
  families.Add(shard.version_buffers());
  families.Gauge("ps_version_buffers_limit", "The limit of ps_version_buffers.");
  families.Add(shard.version_buffers_max());
  families.Gauge("ps_debug_open_calls", "Calls that are being read, are parked or are being answered.");
  families.Add(shard.open_calls());
  families.Gauge("ps_debug_weight_buffer_bytes", "Bytes of all versions that exist now.");
  families.Add(static_cast<double>(shard.weight_buffer_bytes()));
}

void AddPhase(const v1::StatusReply& job, Families& families) {
  families.Gauge("ps_job_phase", "1 for the phase that the job is in, 0 for the others.");
  for (int phase = v1::Phase_MIN + 1; phase <= v1::Phase_MAX; ++phase) {
    families.Add(job.phase() == phase ? 1 : 0, {{"phase", PhaseLabel(static_cast<v1::Phase>(phase))}});
  }
  uint32_t live = 0;
  uint32_t suspect = 0;
  uint32_t done = 0;
  for (const v1::WorkerStatus& worker : job.workers()) {
    ++(worker.done() ? done : worker.suspect() ? suspect : live);
  }
  // Those who have left in the end are not missing.
  const bool wanted = job.phase() == v1::PHASE_GATHERING || job.phase() == v1::PHASE_RUNNING;
  const uint32_t least =
      job.min_workers() > 0 && job.phase() == v1::PHASE_RUNNING ? job.min_workers() : job.num_workers();
  const uint32_t present = live + suspect + done;
  families.Gauge("ps_workers", "Workers by state; missing: so many more are needed for the job to go on.");
  families.Add(live, {{"state", "live"}});
  families.Add(suspect, {{"state", "suspect"}});
  families.Add(wanted && present < least ? least - present : 0, {{"state", "missing"}});
  families.Add(job.standbys(), {{"state", "standby"}});
  families.Add(done, {{"state", "done"}});
}

void AddProgress(const v1::StatusReply& job, Families& families) {
  const v1::ProgressStatus& progress = job.progress();
  families.Counter("ps_rollbacks_total", "How often the job went back to a checkpoint.");
  families.Add(static_cast<double>(progress.rollbacks()));
  families.Counter("ps_worker_losses_total", "Workers that were lost.");
  families.Add(static_cast<double>(progress.worker_losses()));
  families.Counter("ps_dropped_reports_total",
                   "Reports of workers that were not sent, as the one before was not answered yet; the next one has "
                   "what they said.");
  families.Add(static_cast<double>(progress.dropped_reports()));
  families.Gauge("ps_loss",
                 "The mean loss: of the batches that workers trained on last (split=\"train\"), and of the last "
                 "evaluation of each split.");
  if (progress.has_loss()) families.Add(progress.loss().mean(), {{"split", "train"}});
  // What an evaluation says of the training split is another number.
  const bool taken = std::any_of(progress.evaluations().begin(), progress.evaluations().end(),
                                 [](const v1::Evaluation& each) { return each.split() == "train_evaluation"; });
  const auto split_of = [taken](const v1::Evaluation& evaluation) {
    // Where somebody calls another split so, that has the name to itself.
    const char* const name = taken ? "train_evaluation_2" : "train_evaluation";
    return evaluation.split() == "train" ? std::string(name) : evaluation.split();
  };
  for (const v1::Evaluation& each : progress.evaluations()) families.Add(each.loss(), {{"split", split_of(each)}});
  families.Gauge("ps_accuracy_ratio", "The accuracy of the last evaluation of each split, 0 to 1.");
  for (const v1::Evaluation& each : progress.evaluations()) {
    if (each.has_accuracy()) families.Add(each.accuracy(), {{"split", split_of(each)}});
  }
}

void AddWorkers(const PageSnapshot& snapshot, Families& families) {
  const auto& workers = snapshot.job->workers();
  const auto rank_of = [](const v1::WorkerStatus& worker) {
    return ClientMetric::Label{"rank", absl::StrCat(worker.rank())};
  };
  families.Counter("ps_worker_steps_total", "Batches that this rank's worker has trained on.");
  for (const v1::WorkerStatus& worker : workers) {
    if (worker.has_report()) families.Add(static_cast<double>(worker.report().steps()), {rank_of(worker)});
  }
  families.Counter("ps_worker_samples_total", "Samples that this rank's worker has trained on.");
  for (const v1::WorkerStatus& worker : workers) {
    if (worker.has_report()) families.Add(static_cast<double>(worker.report().samples()), {rank_of(worker)});
  }
  families.Counter("ps_worker_held_up_seconds_total", "Time for which others waited for this rank.");
  for (const v1::WorkerStatus& worker : workers) families.Add(worker.held_up_s(), {rank_of(worker)});
  families.Counter("ps_worker_seconds_total", "Where this rank's time went.");
  for (const v1::WorkerStatus& worker : workers) {
    if (!worker.report().has_seconds()) continue;
    const v1::StepTimes& times = worker.report().seconds();
    for (const auto& [phase, seconds] : {std::pair("forward", times.forward()),
                                         {"backward", times.backward()},
                                         {"push", times.push()},
                                         {"wait", times.wait()},
                                         {"pull", times.pull()}}) {
      families.Add(seconds, {rank_of(worker), {"phase", phase}});
    }
  }
  families.Gauge("ps_worker_last_heard_timestamp_seconds", "When this rank was last heard from, in Unix seconds.");
  for (const v1::WorkerStatus& worker : workers) {
    const uint64_t ago_ms = std::min(worker.last_heard_ms(), snapshot.unix_ms);
    families.Add(static_cast<double>(snapshot.unix_ms - ago_ms) * kMillisecond, {rank_of(worker)});
  }
  families.Gauge("ps_worker_info", "Where this rank runs, and how it reaches the servers; always 1.");
  for (const v1::WorkerStatus& worker : workers) {
    families.Add(1, {rank_of(worker),
                     {"host", worker.host()},
                     {"link", worker.report().link()},
                     {"device", worker.report().device()}});
  }
}

}  // namespace

std::vector<MetricFamily> MetricFamilies(const PageFacts& facts, const PageSnapshot& snapshot) {
  Families families;
  AddAbout(facts, snapshot, families);
  if (snapshot.job.has_value()) AddPhase(*snapshot.job, families);
  AddShard(facts, snapshot, families);
  // The chief counts checkpoints that did not come to be; the others those that they could not write.
  families.Counter("ps_checkpoint_failures_total", "Checkpoints that could not be written.");
  families.Add(static_cast<double>(snapshot.job.has_value() ? snapshot.job->progress().checkpoint_failures()
                                                            : snapshot.shard.checkpoint_failures()));
  AddDistributions(snapshot.shard, families);
  AddLimits(snapshot.shard, families);
  if (snapshot.job.has_value()) {
    AddProgress(*snapshot.job, families);
    AddWorkers(snapshot, families);
  }
  return families.Take();
}

std::string MetricsText(const std::vector<MetricFamily>& families) {
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, families);
  return std::move(text).str();
}

}  // namespace ps
