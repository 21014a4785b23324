#include "common/history/job_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/distribution.h"
#include "common/program.h"
#include "common/text.h"

namespace ps {
namespace {

using nlohmann::ordered_json;

// A setting that servers share, by the name of its flag; empty: this job has none such.
std::string Setting(const v1::StatusReply& status, const std::string& name) {
  const auto found = status.settings().find(name);
  return found == status.settings().end() ? "" : found->second;
}

double SecondsOfMs(uint64_t ms) { return static_cast<double>(ms) / 1000; }

// Null: it never was.
ordered_json AgeJson(uint64_t unix_ms, uint64_t now_unix_ms) {
  if (unix_ms == 0) return nullptr;
  return SecondsOfMs(std::max(now_unix_ms, unix_ms) - unix_ms);
}

ordered_json LossJson(const v1::LossRange& loss) {
  return {{"batches", loss.batches()},
          {"mean", JsonNumber(loss.mean())},
          {"least", JsonNumber(loss.least())},
          {"largest", JsonNumber(loss.largest())}};
}

ordered_json TimesJson(const v1::StepTimes& times) {
  return {{"forward", JsonNumber(times.forward())}, {"backward", JsonNumber(times.backward())},
          {"push", JsonNumber(times.push())},       {"wait", JsonNumber(times.wait())},
          {"pull", JsonNumber(times.pull())},       {"other", JsonNumber(times.other())}};
}

ordered_json EvaluationJson(const v1::Evaluation& evaluation) {
  return {{"split", evaluation.split()},
          {"step", evaluation.step()},
          {"version", evaluation.version()},
          {"loss", JsonNumber(evaluation.loss())},
          {"accuracy", evaluation.has_accuracy() ? JsonNumber(evaluation.accuracy()) : ordered_json(nullptr)},
          {"samples", evaluation.samples()}};
}

ordered_json ProgressJson(const v1::ProgressStatus& progress, double worker_step_s) {
  ordered_json evaluations = ordered_json::array();
  for (const v1::Evaluation& each : progress.evaluations()) evaluations.push_back(EvaluationJson(each));
  ordered_json waits_for = ordered_json::array();
  for (const uint32_t rank : progress.waits_for()) waits_for.push_back(rank);
  return {{"step", progress.step()},
          {"all_steps", progress.all_steps()},
          {"samples", progress.samples()},
          {"steps_per_s", JsonNumber(progress.steps_per_s())},
          {"samples_per_s", JsonNumber(progress.samples_per_s())},
          {"left_s", JsonNumber(progress.left_s())},
          {"median_step_s", JsonNumber(progress.median_step_s())},
          {"since_version_s", JsonNumber(progress.since_version_s())},
          {"running_s", JsonNumber(progress.running_s())},
          {"loss", progress.has_loss() ? LossJson(progress.loss()) : ordered_json(nullptr)},
          {"evaluations", std::move(evaluations)},
          {"waits_for", std::move(waits_for)},
          {"waits_s", JsonNumber(progress.waits_s())},
          {"worker_step_s", JsonNumber(worker_step_s)}};
}

ordered_json WorkerJson(const v1::WorkerStatus& worker) {
  const v1::WorkerReport& report = worker.report();
  return {{"rank", worker.rank()},
          {"name", worker.name()},
          {"host", worker.host()},
          {"state", worker.done()      ? "done"
                    : worker.suspect() ? "suspect"
                                       : "live"},
          {"busy_with", worker.busy_with()},
          {"step", worker.step()},
          {"last_heard_s", SecondsOfMs(worker.last_heard_ms())},
          {"held_up_s", JsonNumber(worker.held_up_s())},
          {"steps_per_s", JsonNumber(worker.steps_per_s())},
          {"slow", worker.slow()},
          {"steps", report.steps()},
          {"samples", report.samples()},
          {"loss", report.has_loss() ? LossJson(report.loss()) : ordered_json(nullptr)},
          {"seconds", report.has_seconds() ? TimesJson(report.seconds()) : ordered_json(nullptr)},
          {"sent_bytes", report.sent_bytes()},
          {"received_bytes", report.received_bytes()},
          {"link", report.link()},
          {"device", report.device()},
          {"dropped_reports", report.dropped_reports()}};
}

// The count of each range; the range above all bounds comes last.
ordered_json CountsJson(const google::protobuf::RepeatedField<uint64_t>& counts, size_t bounds) {
  ordered_json all = ordered_json::array();
  for (size_t i = 0; i <= bounds; ++i) {
    all.push_back(i < static_cast<size_t>(counts.size()) ? counts.at(static_cast<int>(i)) : 0);
  }
  return all;
}

ordered_json TimesJson(const v1::Distribution& seconds) {
  return {{"counts", CountsJson(seconds.counts(), kSecondsBounds.size())}, {"sum", JsonNumber(seconds.sum())}};
}

ordered_json CheckpointsJson(const v1::StatusReply& status) {
  if (!status.has_checkpoints()) return nullptr;
  const v1::CheckpointStatus& checkpoints = status.checkpoints();
  return {
      {"path", checkpoints.path()},
      {"version", checkpoints.version()},
      {"age_s", checkpoints.path().empty() ? ordered_json(nullptr) : ordered_json(SecondsOfMs(checkpoints.age_ms()))},
      {"failure", checkpoints.failure()},
      {"writing_s", SecondsOfMs(checkpoints.writing_ms())},
      {"writing", checkpoints.writing()}};
}

ordered_json SlowestJson(const v1::ProgressStatus& progress) {
  ordered_json slowest = ordered_json::array();
  for (const v1::SlowestStep& each : progress.slowest()) {
    slowest.push_back({{"rank", each.rank()},
                       {"step", each.step().step()},
                       {"seconds", JsonNumber(each.step().seconds())},
                       {"times", TimesJson(each.step().times())},
                       {"unix_ms", each.step().unix_ms()}});
  }
  return slowest;
}

// What the job is held up by at present; empty: by nothing.
std::string WaitsFor(const v1::StatusReply& status) {
  const v1::ProgressStatus& progress = status.progress();
  if (progress.waits_for().empty()) return "";
  constexpr int kNamed = 3;
  std::vector<std::string> names;
  for (const uint32_t rank : progress.waits_for()) {
    if (names.size() == kNamed) break;
    const auto worker = std::find_if(status.workers().begin(), status.workers().end(),
                                     [&](const v1::WorkerStatus& each) { return each.rank() == rank; });
    names.push_back(worker == status.workers().end()
                        ? absl::StrCat("rank ", rank)
                        : absl::StrCat("rank ", rank, worker->host().empty() ? "" : " on ", worker->host(),
                                       ", last heard from ", Spoken(SecondsOfMs(worker->last_heard_ms())), " ago"));
  }
  const int more = progress.waits_for_size() - kNamed;
  return absl::StrCat("waiting ", Spoken(progress.waits_s()), " for ", absl::StrJoin(names, "; "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

}  // namespace

std::string PhaseName(v1::Phase phase) {
  switch (phase) {
    case v1::PHASE_GATHERING:
      return "gathering";
    case v1::PHASE_RUNNING:
      return "running";
    case v1::PHASE_FINISHED:
      return "finished";
    case v1::PHASE_FAILED:
      return "failed";
    case v1::PHASE_SHUT_DOWN:
      return "shut down";
    default:
      return "unknown";
  }
}

ordered_json JsonNumber(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

ordered_json JsonNumber(float value) {
  if (!std::isfinite(value)) return JsonNumber(static_cast<double>(value));
  return std::strtod(ExactText(value).c_str(), nullptr);
}

std::string JsonText(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

std::string Grouped(uint64_t number) {
  std::string digits = absl::StrCat(number);
  for (size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

std::string Spoken(double seconds) {
  if (!(seconds >= 0) || std::isinf(seconds)) return "an unknown time";
  if (seconds < 9.95) return absl::StrFormat("%.1f s", seconds);
  if (seconds < 119.5) return absl::StrFormat("%.0f s", seconds);
  const auto minutes = static_cast<uint64_t>(std::llround(std::min(seconds, 1e15) / 60));
  if (minutes < 60) return absl::StrCat(minutes, " min");
  const uint64_t hours = minutes / 60;
  if (hours < 48) return absl::StrCat(hours, " h ", minutes % 60, " min");
  return absl::StrCat(Grouped(hours / 24), " d ", hours % 24, " h");
}

std::string SpokenRate(double rate) {
  if (!std::isfinite(rate) || rate < 0) return "an unknown number of";
  return rate < 99.95 ? absl::StrFormat("%.3g", rate)
                      : Grouped(static_cast<uint64_t>(std::llround(std::min(rate, 1e18))));
}

std::string WorkerName(const v1::WorkerStatus& worker) {
  std::string name = absl::StrCat("rank ", worker.rank());
  if (worker.name().empty() && worker.host().empty()) return name;
  return absl::StrCat(name, " (", worker.name(),
                      worker.host().empty()   ? ""
                      : worker.name().empty() ? "on "
                                              : " on ",
                      worker.host(), ")");
}

double WorkerStepSeconds(const v1::StatusReply& status) {
  std::vector<double> means;
  for (const v1::WorkerStatus& worker : status.workers()) {
    const v1::WorkerReport& report = worker.report();
    const v1::StepTimes& times = report.seconds();
    const double sum = times.forward() + times.backward() + times.push() + times.wait() + times.pull() + times.other();
    if (report.steps() > 0 && sum > 0) means.push_back(sum / static_cast<double>(report.steps()));
  }
  if (means.empty()) return 0;
  const auto middle = means.begin() + static_cast<std::ptrdiff_t>(means.size() / 2);
  std::nth_element(means.begin(), middle, means.end());
  return *middle;
}

std::string DescribeTimes(const v1::StepTimes& times) {
  std::vector<std::pair<double, const char*>> parts = {{times.forward(), "forward"}, {times.backward(), "backward"},
                                                       {times.push(), "push"},       {times.wait(), "wait"},
                                                       {times.pull(), "pull"},       {times.other(), "other"}};
  double all = 0;
  for (const auto& [seconds, phase] : parts) all += seconds;
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::string> words;
  for (const auto& [seconds, phase] : parts) {
    if (seconds > 0 && seconds >= all / 100) words.push_back(absl::StrFormat("%s %.2f s", phase, seconds));
  }
  return absl::StrJoin(words, ", ");
}

ordered_json ShardJson(const v1::ShardStatusReply& shard, const std::string& address, uint64_t now_unix_ms) {
  ordered_json links = ordered_json::array();
  for (const v1::LinkBytes& each : shard.links()) {
    links.push_back({{"link", each.link()}, {"received_bytes", each.received()}, {"sent_bytes", each.sent()}});
  }
  ordered_json refused = ordered_json::object();
  for (const v1::RefusedCalls& each : shard.refused_calls()) refused[each.code()] = each.calls();
  return {{"shard", shard.shard()},
          {"address", address},
          {"version", shard.version()},
          {"learning_rate", JsonNumber(shard.learning_rate())},
          {"updates", shard.updates()},
          {"answers",
           {{"applied", shard.applied()},
            {"duplicate", shard.duplicate()},
            {"stale", shard.stale()},
            {"fenced", shard.fenced()}}},
          {"applied_samples", shard.applied_samples()},
          {"dropped_samples", shard.dropped_samples()},
          {"inflight_bytes", shard.inflight_bytes()},
          {"inflight_limit_bytes", shard.inflight_bytes_max()},
          {"parked_calls", shard.parked()},
          {"parked_calls_limit", shard.parked_max()},
          {"version_buffers", shard.version_buffers()},
          {"version_buffers_limit", shard.version_buffers_max()},
          {"weight_bytes", shard.bytes()},
          {"links", std::move(links)},
          {"push_seconds", TimesJson(shard.push_seconds())},
          {"apply_seconds", TimesJson(shard.apply_seconds())},
          {"push_wait_seconds", TimesJson(shard.push_wait_seconds())},
          {"pull_wait_seconds", TimesJson(shard.pull_wait_seconds())},
          {"checkpoint_seconds", TimesJson(shard.checkpoint_seconds())},
          {"refused_calls", std::move(refused)},
          {"checkpoint_age_s", AgeJson(shard.checkpoint_unix_ms(), now_unix_ms)},
          {"checkpoint_failures", shard.checkpoint_failures()},
          {"clock_gap_steps", shard.clock_gap_steps()},
          {"waiting_for", shard.waiting_for()}};
}

ordered_json JobJson(const v1::StatusReply& status) {
  const v1::ProgressStatus& progress = status.progress();
  ordered_json hyperparameters = ordered_json::object();
  for (const v1::Hyperparameter& each : status.hyperparameters()) {
    hyperparameters[each.name()] = JsonNumber(each.value());
  }
  ordered_json workers = ordered_json::array();
  for (const v1::WorkerStatus& worker : status.workers()) workers.push_back(WorkerJson(worker));
  std::map<uint32_t, std::string> addresses;
  for (const v1::ShardInfo& info : status.shards()) addresses[info.shard()] = info.address();
  ordered_json shards = ordered_json::array();
  v1::Distribution staleness;
  for (const v1::ShardStatusReply& shard : status.shard_status()) {
    shards.push_back(ShardJson(shard, addresses[shard.shard()], progress.unix_ms()));
    Merge(shard.staleness(), staleness);
  }
  return {{"job", status.job()},
          {"version", kVersion},
          {"generation", status.generation()},
          {"phase", PhaseName(status.phase())},
          {"failure", status.failure()},
          {"mode", Setting(status, "mode")},
          {"optimizer", Setting(status, "optimizer")},
          {"num_workers", status.num_workers()},
          {"min_workers", status.min_workers()},
          {"max_workers", status.max_workers()},
          {"standbys", status.standbys()},
          {"num_shards", status.num_shards()},
          {"parameters", status.parameters()},
          {"headline", Headline(status)},
          {"waiting_for", status.waiting_for()},
          {"stuck", progress.stuck()},
          {"progress", ProgressJson(progress, WorkerStepSeconds(status))},
          {"hyperparameters", std::move(hyperparameters)},
          {"workers", std::move(workers)},
          {"shards", std::move(shards)},
          {"staleness",
           {{"bounds", kStalenessBounds}, {"counts", CountsJson(staleness.counts(), kStalenessBounds.size())}}},
          {"seconds_bounds", kSecondsBounds},
          {"checkpoints", CheckpointsJson(status)},
          {"slowest", SlowestJson(progress)},
          {"counts",
           {{"rollbacks", progress.rollbacks()},
            {"worker_losses", progress.worker_losses()},
            {"checkpoint_failures", progress.checkpoint_failures()},
            {"dropped_reports", progress.dropped_reports()}}},
          {"runs", ordered_json::array()},
          {"unix_ms", progress.unix_ms()}};
}

std::string Headline(const v1::StatusReply& status) {
  const v1::ProgressStatus& progress = status.progress();
  const std::string step = absl::StrCat("step ", Grouped(progress.step()));
  switch (status.phase()) {
    case v1::PHASE_RUNNING:
      break;
    case v1::PHASE_FINISHED:
      return absl::StrCat("finished at ", step, ", ", Grouped(progress.samples()), " samples in ",
                          Spoken(progress.running_s()));
    case v1::PHASE_FAILED:
      return absl::StrCat("failed at ", step, status.failure().empty() ? "" : ": ", status.failure());
    default:
      return absl::StrCat(PhaseName(status.phase()), status.waiting_for().empty() ? "" : ": ", status.waiting_for());
  }
  if (progress.step() == 0 && progress.stuck().empty()) {
    const std::string waits = WaitsFor(status);
    return absl::StrCat("no step yet, running for ", Spoken(progress.running_s()), waits.empty() ? "" : "; ", waits);
  }
  std::string line = step;
  if (progress.steps_per_s() > 0) absl::StrAppend(&line, ", ", SpokenRate(progress.steps_per_s()), " steps/s");
  if (progress.left_s() > 0) absl::StrAppend(&line, ", ", Spoken(progress.left_s()), " left");
  const std::string held_up = progress.stuck().empty() ? WaitsFor(status) : progress.stuck();
  return absl::StrCat(line, held_up.empty() ? "" : "; ", held_up);
}

}  // namespace ps
