// ps_ctl: inspects a running job, changes its hyperparameters, and compares the metrics of finished ones.
#include <algorithm>
#include <iostream>
#include <optional>
#include <vector>

#include <grpcpp/client_context.h>
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/connection_problem.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/problems.h"
#include "common/program.h"
#include "common/schedule_proto.h"
#include "common/text.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/client/pause.h"
#include "worker/client/weights_hash.h"
#include "worker/ctl/export.h"
#include "worker/ctl/report.h"
#include "worker/ctl/set.h"

ABSL_FLAG(std::string, server, "127.0.0.1:5000",
          "address of the chief (server 0), or for health of any server: HOST:PORT or unix:PATH");
ABSL_FLAG(std::string, output, "", "of export: the file");
ABSL_FLAG(
    std::string, checkpoint, "",
    "of export: a checkpoint's folder, or a --checkpoint_dir of servers, of which the newest complete one is taken; "
    "empty: the running job");
ABSL_FLAG(int64_t, version, -1, "of export from a running job: exactly this version; -1: the newest");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(10), "how long to try and to wait for an answer");

namespace ps {
namespace {

constexpr char kUsage[] =
    "ps_ctl [flags] COMMAND\n"
    "  health          asks gRPC's health service whether this server is serving; exit status 0 if it is\n"
    "  status          the job, its shards and workers, and what the job is waiting for\n"
    "  set NAME=VALUE… changes hyperparameters of a running job (learning_rate=0.01), on all shards at one version;\n"
    "                  schedule=NAME, with its lengths and the like, takes the place of the present schedule\n"
    "  checkpoint      takes a checkpoint now, and prints its path and version\n"
    "  drain WORKER    asks a worker, by name or rank, to end its step and leave; prints whom\n"
    "  weights_hash    the hash of the newest weights: of one version in bsp, of each shard's newest in asp\n"
    "  export          writes the whole model's weights to one safetensors file (--output), from the running job or\n"
    "                  from a checkpoint (--checkpoint)\n"
    "  report DIR…     a table that compares runs, from the metrics files in each folder";

constexpr absl::Duration kRetry = absl::Milliseconds(200);
constexpr absl::Duration kNoticeEvery = absl::Seconds(3);
constexpr absl::Duration kReplyMargin = absl::Seconds(1);
constexpr absl::Duration kMaxTimeout = absl::Hours(24);

// A failed call in a line: whom it was for, and what is wrong.
absl::Status Problem(const std::string& server, const absl::Status& status) {
  return {status.code(), absl::StrCat(server, ": ", ConnectionProblem(status))};
}

class JobView {
 public:
  JobView(std::string server, absl::Duration timeout) : server_(std::move(server)), timeout_(timeout) {}

  absl::StatusOr<v1::StatusReply> Status(bool layout = false) {
    v1::StatusRequest request;
    request.set_layout(layout);
    return AskChief<v1::StatusReply>(/*waits_for_room=*/false,
                                     [&](auto& stub, auto* context, absl::Duration /*left*/, auto* reply) {
                                       return stub.Status(context, request, reply);
                                     });
  }

  // Waits at the chief for a change that is under way, and is answered a little before the timeout.
  absl::StatusOr<v1::SetHyperparametersReply> Set(v1::SetHyperparametersRequest request) {
    return AskChief<v1::SetHyperparametersReply>(
        /*waits_for_room=*/true, [&request](auto& stub, auto* context, absl::Duration left, auto* reply) {
          const absl::Duration wait = left - std::min(kReplyMargin, left / 3);
          request.set_wait_ms(static_cast<uint32_t>(std::max<int64_t>(1, absl::ToInt64Milliseconds(wait))));
          return stub.SetHyperparameters(context, request, reply);
        });
  }

  // Likewise, for a checkpoint.
  absl::StatusOr<v1::CheckpointReply> Checkpoint() {
    return AskChief<v1::CheckpointReply>(
        /*waits_for_room=*/true, [](auto& stub, auto* context, absl::Duration left, auto* reply) {
          v1::CheckpointRequest request;
          const absl::Duration wait = left - std::min(kReplyMargin, left / 3);
          request.set_wait_ms(static_cast<uint32_t>(std::max<int64_t>(1, absl::ToInt64Milliseconds(wait))));
          return stub.Checkpoint(context, request, reply);
        });
  }

  absl::StatusOr<v1::DrainReply> Drain(const std::string& worker) {
    v1::DrainRequest request;
    request.set_worker(worker);
    return AskChief<v1::DrainReply>(/*waits_for_room=*/false,
                                    [&](auto& stub, auto* context, absl::Duration /*left*/, auto* reply) {
                                      return stub.Drain(context, request, reply);
                                    });
  }

  // Retries until the timeout while the chief cannot be reached, or is to be waited for because it has no room; reports
  // the problem at once and every few seconds. `call` is told the time that is left.
  template <typename Reply, typename Call>
  absl::StatusOr<Reply> AskChief(bool waits_for_room, Call call) {
    const auto stub = v1::Chief::NewStub(Channel(server_));
    const absl::Time deadline = absl::Now() + timeout_;
    for (absl::Time noticed = absl::InfinitePast();;) {
      Reply reply;
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(deadline));
      const absl::Status status = FromGrpc(call(*stub, &context, deadline - absl::Now(), &reply));
      if (status.ok()) return reply;
      const absl::Status problem = Problem("--server=" + server_, status);
      const bool transient = absl::IsUnavailable(status) || (waits_for_room && absl::IsResourceExhausted(status));
      if (!transient || absl::Now() + kRetry >= deadline) return problem;
      if (absl::Now() - noticed >= kNoticeEvery) {
        std::cerr << "ps_ctl: " << Message(problem) << "; retrying\n";
        noticed = absl::Now();
      }
      PauseUntil(Now() + ToChrono(kRetry));
    }
  }

  std::string ShardAddress(const v1::ShardInfo& shard) const { return shard.shard() == 0 ? server_ : shard.address(); }
  std::shared_ptr<grpc::Channel> ShardChannel(const v1::ShardInfo& shard) { return Channel(ShardAddress(shard)); }

  template <typename Reply, typename Call>
  absl::StatusOr<Reply> AskShard(const v1::ShardInfo& shard, Call call) {
    Reply reply;
    const std::string address = ShardAddress(shard);
    const auto stub = v1::Shard::NewStub(Channel(address));
    grpc::ClientContext context;
    SetDeadline(context);
    const absl::Status status = FromGrpc(call(*stub, &context, &reply));
    if (!status.ok()) return Problem(absl::StrCat("shard ", shard.shard(), " at ", address), status);
    return reply;
  }

 private:
  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    return MakeChannel(address, grpc::InsecureChannelCredentials(), 0);
  }
  void SetDeadline(grpc::ClientContext& context) const {
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
    context.set_wait_for_ready(true);
  }
  const std::string server_;
  const absl::Duration timeout_;
};

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
    default:
      return "unknown";
  }
}

std::string DescribePosition(const v1::ShardStatusReply& shard, uint64_t samples_per_epoch) {
  const std::string epochs = samples_per_epoch == 0
                                 ? ""
                                 : absl::StrFormat(" (%.2f epochs)", static_cast<double>(shard.position()) /
                                                                         static_cast<double>(samples_per_epoch));
  return absl::StrCat(shard.position(), " samples have passed", epochs, "; learning rate ",
                      ExactText(shard.learning_rate()));
}

std::string DescribeCheckpoints(const v1::CheckpointStatus& checkpoints) {
  const std::string last =
      checkpoints.path().empty()
          ? "no checkpoint yet"
          : absl::StrCat("last checkpoint: ", checkpoints.path(), ", version ", checkpoints.version(), ", ",
                         FormatSeconds(std::chrono::milliseconds(checkpoints.age_ms())), " ago");
  return checkpoints.failure().empty() ? last : absl::StrCat(last, "; the newest failed: ", checkpoints.failure());
}

void PrintJob(const v1::StatusReply& job) {
  std::cout << absl::StrFormat("job %s: %s, generation %d, view %d, %d parameters\n", job.job(), PhaseName(job.phase()),
                               job.generation(), job.view(), job.parameters());
  if (!job.failure().empty()) std::cout << "failure: " << job.failure() << "\n";
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
  if (!job.waiting_for().empty()) std::cout << job.waiting_for() << "\n";
}

absl::Status PrintStatus(JobView& view) {
  const absl::StatusOr<v1::StatusReply> job = view.Status();
  if (!job.ok()) return job.status();
  PrintJob(*job);
  std::cout << absl::StrFormat("\nshards: %d\n%5s  %-24s %10s %7s %13s %13s %13s %7s %7s %7s %14s\n", job->num_shards(),
                               "shard", "address", "version", "slices", "weight bytes", "buffers", "in flight",
                               "parked", "others", "calls", "max unread");
  absl::Status result = absl::OkStatus();
  for (const v1::ShardInfo& info : job->shards()) {
    if (info.address().empty()) {
      std::cout << absl::StrFormat("%5d  (not registered)\n", info.shard());
      continue;
    }
    const auto shard = view.AskShard<v1::ShardStatusReply>(info, [](auto& stub, auto* context, auto* reply) {
      return stub.ShardStatus(context, v1::ShardStatusRequest(), reply);
    });
    if (!shard.ok()) {
      std::cout << absl::StrFormat("%5d  %-24s %s\n", info.shard(), info.address(), Message(shard.status()));
      result = shard.status();
      continue;
    }
    std::cout << absl::StrFormat(
        "%5d  %-24s %10d %7d %13d %13d %13d %7d %7d %7d %14d  %s\n", info.shard(), info.address(), shard->version(),
        shard->slices(), shard->bytes(), shard->weight_buffer_bytes(), shard->inflight_bytes(), shard->parked(),
        shard->parked_others(), shard->open_calls(), shard->receive_buffer_bytes_max(), shard->waiting_for());
    if (shard->slices() > 0) {
      std::cout << "       " << DescribePosition(*shard, job->samples_per_epoch()) << "\n";
    }
    if (shard->shared_memory_size() > 0) {
      std::cout << "       through shared memory: rank " << absl::StrJoin(shard->shared_memory(), ", ") << "\n";
    }
    for (const v1::DroppedPushes& dropped : shard->dropped()) {
      std::cout << absl::StrFormat("       stale, of rank %d: %d pushes with %d samples\n", dropped.rank(),
                                   dropped.pushes(), dropped.samples());
    }
  }
  std::cout << absl::StrFormat("\nworkers: %d of %d\n%5s  %-32s %-20s %11s %10s %10s\n", job->workers_size(),
                               job->num_workers(), "rank", "name", "host", "incarnation", "step", "last heard");
  for (const v1::WorkerStatus& worker : job->workers()) {
    std::cout << absl::StrFormat("%5d  %-32s %-20s %11d %10d %8.1f s%s%s\n", worker.rank(), worker.name(),
                                 worker.host(), worker.incarnation(), worker.step(),
                                 static_cast<double>(worker.last_heard_ms()) / 1000.0, worker.done() ? "  done" : "",
                                 worker.suspect() ? "  connection lost" : "");
  }
  return result;
}

absl::Status PrintSet(JobView& view, const v1::SetHyperparametersRequest& request) {
  const absl::StatusOr<v1::SetHyperparametersReply> reply = view.Set(request);
  if (!reply.ok()) return reply.status();
  std::cout << DescribeChange(request, *reply) << "\n";
  return absl::OkStatus();
}

absl::Status PrintCheckpoint(JobView& view) {
  const absl::StatusOr<v1::CheckpointReply> reply = view.Checkpoint();
  if (!reply.ok()) return reply.status();
  std::cout << reply->path() << " version " << reply->version() << "\n";
  return absl::OkStatus();
}

absl::Status PrintDrain(JobView& view, const std::string& worker) {
  const absl::StatusOr<v1::DrainReply> reply = view.Drain(worker);
  if (!reply.ok()) return reply.status();
  std::cout << "rank " << reply->rank() << " (" << reply->name() << " on " << reply->host() << ") is asked to leave\n";
  return absl::OkStatus();
}

absl::Status PrintWeightsHash(JobView& view, TimePoint deadline) {
  const absl::StatusOr<v1::StatusReply> status = view.Status();
  if (!status.ok()) return status.status();
  HashJob job = {.channels = {}, .slices = 0, .one_version = status->synchronous(), .id = {}};
  for (const v1::ShardInfo& info : status->shards()) {
    if (info.address().empty())
      return absl::UnavailableError(absl::StrCat("shard ", info.shard(), " is not registered"));
    job.channels.push_back(view.ShardChannel(info));
    job.slices += static_cast<size_t>(info.slices_size());
  }
  if (job.slices == 0) {
    return absl::UnavailableError(absl::StrCat("the job has no weights yet: ", status->waiting_for()));
  }
  const absl::StatusOr<HashedWeights> hashed = HashWeights(job, deadline, {});
  if (!hashed.ok()) return hashed.status();
  const auto [lowest, newest] = std::minmax_element(hashed->versions.begin(), hashed->versions.end());
  std::cout << hashed->hash << " version " << *lowest;
  if (*lowest != *newest)
    std::cout << " to " << *newest << " (by shard: " << absl::StrJoin(hashed->versions, ", ") << ")";
  std::cout << "\n";
  return absl::OkStatus();
}

absl::StatusOr<std::string> ExportServed(JobView& view, const std::string& output) {
  const absl::StatusOr<v1::StatusReply> status = view.Status(/*layout=*/true);
  if (!status.ok()) return status.status();
  ServedModel served = {.shards = {}, .one_version = status->synchronous()};
  for (const v1::ShardInfo& info : status->shards()) {
    if (info.address().empty()) {
      return absl::UnavailableError(absl::StrCat("shard ", info.shard(), " is not registered"));
    }
    served.shards.push_back({.channel = view.ShardChannel(info), .address = view.ShardAddress(info)});
  }
  const int64_t version = absl::GetFlag(FLAGS_version);
  return ExportJob(*status, served,
                   version < 0 ? std::nullopt : std::optional<uint64_t>(static_cast<uint64_t>(version)),
                   ToChrono(absl::GetFlag(FLAGS_timeout)), output);
}

absl::Status Export(JobView& view) {
  const std::string output = absl::GetFlag(FLAGS_output);
  const std::string checkpoint = absl::GetFlag(FLAGS_checkpoint);
  const absl::StatusOr<std::string> done =
      checkpoint.empty() ? ExportServed(view, output) : ExportCheckpoint(checkpoint, output);
  if (done.ok()) std::cout << *done << "\n";
  return done.status();
}

void CheckExportFlags(const CommandLine& line, bool exports, Problems& problems) {
  const std::string checkpoint = absl::GetFlag(FLAGS_checkpoint);
  problems.Check(!exports || !absl::GetFlag(FLAGS_output).empty(), "--output: expected the file to export to");
  problems.Check(absl::GetFlag(FLAGS_version) >= -1, "--version: expected a version, or -1");
  const bool stored = exports && !checkpoint.empty();
  problems.Check(CheckIdleFlags(line, {{"output", !exports, "only export writes a file"},
                                       {"checkpoint", !exports, "only export reads one"},
                                       {"version", !exports, "only export takes a version"},
                                       {"version", stored, "the checkpoint says which version it has"},
                                       {"server", stored, "--checkpoint is read without a server"}}));
}

absl::Status PrintHealth(const std::string& server, absl::Duration timeout) {
  namespace health = grpc::health::v1;
  const auto stub = health::Health::NewStub(MakeChannel(server, grpc::InsecureChannelCredentials(), 0));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  health::HealthCheckResponse reply;
  const absl::Status status = FromGrpc(stub->Check(&context, health::HealthCheckRequest(), &reply));
  if (!status.ok()) return Problem("--server=" + server, status);
  std::cout << health::HealthCheckResponse::ServingStatus_Name(reply.status()) << "\n";
  if (reply.status() == health::HealthCheckResponse::SERVING) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("--server=", server, ": not serving"));
}

absl::Status PrintReport(const std::vector<std::string>& folders) {
  std::vector<RunSummary> runs;
  for (const std::string& folder : folders) {
    absl::StatusOr<RunSummary> run = SummarizeRun(folder);
    if (!run.ok()) return run.status();
    runs.push_back(*std::move(run));
  }
  std::cout << FormatTable(runs);
  return absl::OkStatus();
}

}  // namespace
}  // namespace ps

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, kUsage, "worker/ctl/main.cc", &line, &exit_status)) return exit_status;
  const std::string command = line.arguments.empty() ? "" : line.arguments.front();
  const std::vector<std::string> rest(line.arguments.begin() + (command.empty() ? 0 : 1), line.arguments.end());
  const bool alone = command == "health" || command == "status" || command == "checkpoint" ||
                     command == "weights_hash" || command == "export";
  const bool known = alone                ? rest.empty()
                     : command == "drain" ? rest.size() == 1
                                          : (command == "report" || command == "set") && !rest.empty();
  if (!known) {
    return Complain("ps_ctl", absl::InvalidArgumentError(absl::StrCat("expected a command\n", kUsage)), kExitUsage);
  }
  const std::string server = absl::GetFlag(FLAGS_server);
  const absl::Duration timeout = absl::GetFlag(FLAGS_timeout);
  Problems problems;
  problems.Check(ParseEndpoint("server", server).status());
  problems.CheckPositive("timeout", timeout, kMaxTimeout);
  CheckExportFlags(line, command == "export", problems);
  v1::SetHyperparametersRequest request;
  if (command == "set") problems.Read(ParseAssignments(rest), request);
  if (const absl::Status valid = problems.ToStatus(); !valid.ok()) return Complain("ps_ctl", valid, kExitUsage);
  InitLogging("ps_ctl");
  JobView view(server, timeout);
  absl::Status status = command == "report"       ? PrintReport(rest)
                        : command == "health"     ? PrintHealth(server, timeout)
                        : command == "status"     ? PrintStatus(view)
                        : command == "export"     ? Export(view)
                        : command == "set"        ? PrintSet(view, request)
                        : command == "checkpoint" ? PrintCheckpoint(view)
                        : command == "drain"      ? PrintDrain(view, rest.front())
                                                  : PrintWeightsHash(view, Now() + ToChrono(timeout));
  status.Update(FlushOutput());
  return status.ok() ? kExitDone : Complain("ps_ctl", status, kExitFailed);
}
