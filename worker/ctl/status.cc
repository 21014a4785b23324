#include "worker/ctl/status.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/history/job_json.h"
#include "common/problems.h"
#include "common/proto_values.h"
#include "common/schedule.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/ctl/watch.h"

namespace ps {
namespace {

std::string DescribePosition(const v1::ShardStatusReply& shard, const v1::StatusReply& job) {
  const uint64_t samples_per_epoch = job.samples_per_epoch();
  const std::string epochs = samples_per_epoch == 0
                                 ? ""
                                 : absl::StrFormat(" (%.2f epochs)", static_cast<double>(shard.position()) /
                                                                         static_cast<double>(samples_per_epoch));
  // With --optimizer=local it is the workers' own affair.
  const bool has_rate = std::any_of(job.hyperparameters().begin(), job.hyperparameters().end(),
                                    [](const v1::Hyperparameter& each) { return each.name() == "learning_rate"; });
  return absl::StrCat(shard.position(), " samples have passed", epochs,
                      has_rate ? absl::StrCat("; learning rate ", ExactText(shard.learning_rate())) : "");
}

std::string DescribeCheckpoints(const v1::CheckpointStatus& checkpoints) {
  const std::string last =
      checkpoints.path().empty()
          ? "no checkpoint yet"
          : absl::StrCat("last checkpoint: ", checkpoints.path(), ", version ", checkpoints.version(), ", ",
                         FormatSeconds(std::chrono::milliseconds(checkpoints.age_ms())), " ago");
  return absl::StrCat(last, checkpoints.failure().empty() ? "" : "; the newest failed: ", checkpoints.failure(),
                      checkpoints.writing().empty()
                          ? ""
                          : absl::StrCat("; one is being taken for ",
                                         FormatSeconds(std::chrono::milliseconds(checkpoints.writing_ms())),
                                         ": waiting for ", checkpoints.writing()));
}

void PrintJob(const v1::StatusReply& job) {
  std::cout << absl::StrFormat("job %s: %s, generation %d, view %d, %d parameters\n", job.job(), PhaseName(job.phase()),
                               job.generation(), job.view(), job.parameters());
  if (!job.failure().empty()) std::cout << "failure: " << job.failure() << "\n";
  if (job.has_progress() && job.phase() == v1::PHASE_RUNNING) std::cout << Headline(job) << "\n";
  if (const std::string learning = DescribeLearning(job); !learning.empty()) std::cout << learning << "\n";
  std::vector<std::string> settings;
  for (const auto& [name, value] : job.settings()) settings.push_back(absl::StrCat("--", name, "=", value));
  std::sort(settings.begin(), settings.end());
  std::cout << "settings:";
  for (const std::string& setting : settings) std::cout << " " << setting;
  std::cout << "\n";
  if (job.hyperparameters_size() > 0) std::cout << "now: " << DescribeValues(job.hyperparameters()) << "\n";
  if (job.has_schedule()) {
    const absl::StatusOr<Schedule> schedule = FromProto(job.schedule());
    std::cout << (schedule.ok() ? ToString(*schedule) : Message(schedule.status()))
              << (job.samples_per_epoch() == 0 ? ""
                                               : absl::StrCat("; an epoch has ", job.samples_per_epoch(), " samples"))
              << "\n";
  }
  if (job.has_checkpoints()) std::cout << DescribeCheckpoints(job.checkpoints()) << "\n";
  if (job.has_epoch()) {
    const v1::EpochStatus& epoch = job.epoch();
    std::cout << absl::StrFormat(
        "samples of epoch %d of %d: %d of %d counted, %d handed out%s\n", epoch.epoch() + 1, epoch.epochs(),
        epoch.counted(), epoch.samples(), epoch.open(),
        epoch.returned() > 0 ? absl::StrCat(", ", epoch.returned(), " to be handed out again") : "");
  }
  if (!job.waiting_for().empty()) std::cout << job.waiting_for() << "\n";
}

// Writes ascending numbers as "0 to 3, 7".
std::string Runs(const google::protobuf::RepeatedField<uint32_t>& numbers) {
  std::vector<std::string> runs;
  for (int i = 0; i < numbers.size();) {
    int end = i + 1;
    while (end < numbers.size() && numbers.at(end) == numbers.at(end - 1) + 1) ++end;
    const bool several = end - i > 1;
    runs.push_back(several ? absl::StrCat(numbers.at(i), " to ", numbers.at(end - 1)) : absl::StrCat(numbers.at(i)));
    i = end;
  }
  return absl::StrJoin(runs, ", ");
}

void PrintShard(const v1::ShardInfo& info, const v1::ShardStatusReply& shard, const v1::StatusReply& job) {
  std::cout << absl::StrFormat(
      "%5d  %-24s %10d %7d %13d %13d %13d %7d %7d %7d %14d  %s\n", info.shard(), info.address(), shard.version(),
      shard.slices(), shard.bytes(), shard.weight_buffer_bytes(), shard.inflight_bytes(), shard.parked(),
      shard.parked_others(), shard.open_calls(), shard.receive_buffer_bytes_max(), shard.waiting_for());
  if (shard.slices() > 0) std::cout << "       " << DescribePosition(shard, job) << "\n";
  if (shard.shared_memory_size() > 0) {
    std::cout << "       through shared memory: rank " << Runs(shard.shared_memory()) << "\n";
  }
  for (const v1::DroppedPushes& dropped : shard.dropped()) {
    std::cout << absl::StrFormat("       stale, of rank %d: %d pushes with %d samples\n", dropped.rank(),
                                 dropped.pushes(), dropped.samples());
  }
}

absl::Status PrintShards(JobCalls& calls, const v1::StatusReply& job) {
  std::cout << absl::StrFormat("\nshards: %d\n%5s  %-24s %10s %7s %13s %13s %13s %7s %7s %7s %14s\n", job.num_shards(),
                               "shard", "address", "version", "slices", "weight bytes", "buffers", "in flight",
                               "parked", "others", "calls", "max unread");
  absl::Status result = absl::OkStatus();
  for (const v1::ShardInfo& info : job.shards()) {
    if (info.address().empty()) {
      std::cout << absl::StrFormat("%5d  (not registered)\n", info.shard());
      continue;
    }
    const absl::StatusOr<v1::ShardStatusReply> shard = calls.ShardStatus(info);
    if (shard.ok()) {
      PrintShard(info, *shard, job);
    } else {
      std::cout << absl::StrFormat("%5d  %-24s %s\n", info.shard(), info.address(), Message(shard.status()));
      result = shard.status();
    }
  }
  return result;
}

// "4", or, where they come and go, "2 to 6".
std::string Workers(const v1::StatusReply& job) {
  const bool elastic = job.min_workers() > 0;
  return elastic ? absl::StrCat(job.min_workers(), " to ", job.max_workers()) : absl::StrCat(job.num_workers());
}

void PrintWorkers(const v1::StatusReply& job) {
  std::cout << absl::StrFormat("\nworkers: %d of %s%s\n%5s  %-32s %-20s %11s %10s %10s\n", job.workers_size(),
                               Workers(job),
                               job.standbys() > 0 ? absl::StrCat(", ", job.standbys(), " standing by") : "", "rank",
                               "name", "host", "incarnation", "step", "last heard");
  for (const v1::WorkerStatus& worker : job.workers()) {
    std::cout << absl::StrFormat("%5d  %-32s %-20s %11d %10d %8.1f s%s%s%s\n", worker.rank(), worker.name(),
                                 worker.host(), worker.incarnation(), worker.step(),
                                 static_cast<double>(worker.last_heard_ms()) / 1000.0, worker.done() ? "  done" : "",
                                 worker.suspect() ? "  connection lost" : "", worker.slow() ? "  slow" : "");
  }
}

constexpr size_t kMaxShownBytes = 256;  // A message shows so much of an argument.

}  // namespace

absl::Status PrintStatus(JobCalls& calls) {
  PS_ASSIGN_OR_RETURN(const v1::StatusReply job, calls.Status());
  PrintJob(job);
  const absl::Status shards = PrintShards(calls, job);
  PrintWorkers(job);
  return shards;
}

absl::StatusOr<v1::SetHyperparametersRequest> ParseAssignments(const std::vector<std::string>& arguments) {
  Problems problems;
  v1::SetHyperparametersRequest request;
  const std::vector<std::string> of_schedule = ScheduleFlags();
  for (const std::string& argument : arguments) {
    const size_t sign = argument.find('=');
    const std::string name = argument.substr(0, std::min(sign, argument.size()));
    const bool is_assignment = sign != std::string::npos && !name.empty();
    const std::string text = is_assignment ? argument.substr(sign + 1) : "";
    if (std::find(of_schedule.begin(), of_schedule.end(), name) != of_schedule.end() && is_assignment) {
      const absl::Status good = CheckText(name, text, kMaxShownBytes);
      problems.Check(good);
      const bool first = !good.ok() || request.mutable_schedule()->insert({name, text}).second;
      problems.Check(first, argument, ": ", name, " is given twice");
      continue;
    }
    float value = 0;
    const bool good = is_assignment && CheckText("", name, kMaxShownBytes).ok() && absl::SimpleAtof(text, &value);
    problems.Check(good, Printable(argument, kMaxShownBytes), ": expected NAME=VALUE, VALUE a number");
    if (!good) continue;
    v1::Hyperparameter* const message = request.add_values();
    message->set_name(name);
    message->set_value(value);
  }
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return request;
}

std::string DescribeValues(const google::protobuf::RepeatedPtrField<v1::Hyperparameter>& values) {
  return absl::StrJoin(values, " ", [](std::string* out, const v1::Hyperparameter& each) {
    absl::StrAppend(out, each.name(), "=", ExactText(each.value()));
  });
}

std::string DescribeChange(const v1::SetHyperparametersRequest& request, const v1::SetHyperparametersReply& reply) {
  const auto& shards = reply.shards();
  const bool one = std::all_of(shards.begin(), shards.end(), [&](const v1::ShardVersion& each) {
    return each.version() == shards.begin()->version();
  });
  std::vector<std::string> parts;
  if (request.values_size() > 0) parts.push_back(DescribeValues(request.values()));
  const std::map<std::string, std::string> schedule(request.schedule().begin(), request.schedule().end());
  for (const auto& [name, value] : schedule) parts.push_back(absl::StrCat(name, "=", value));
  const std::string what = absl::StrJoin(parts, " ");
  if (one && !shards.empty()) return absl::StrCat(what, " from version ", shards.begin()->version(), " on");
  return absl::StrCat(what, " from version ",
                      absl::StrJoin(shards, ", ", [](std::string* out, const v1::ShardVersion& each) {
                        absl::StrAppend(out, each.version(), " on shard ", each.shard());
                      }));
}

}  // namespace ps
