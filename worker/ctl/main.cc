// ps_ctl: inspects a running job, changes its hyperparameters, and compares the metrics of finished ones.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <optional>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/help.h"
#include "common/history/job_json.h"
#include "common/problems.h"
#include "common/program.h"
#include "common/status.h"
#include "common/text.h"
#include "worker/ctl/export.h"
#include "worker/ctl/job_calls.h"
#include "worker/ctl/report.h"
#include "worker/ctl/status.h"
#include "worker/ctl/traces.h"
#include "worker/ctl/view.h"
#include "worker/ctl/watch.h"
#include "worker/ctl/workers.h"
#include "worker/link/weights_hash.h"

ABSL_FLAG(std::string, server, "127.0.0.1:5000",
          "address of the chief (server 0), or for health of any server: HOST:PORT or unix:PATH");
ABSL_FLAG(std::string, output, "", "of export and merge_traces: the file");
ABSL_FLAG(
    std::string, from, "",
    "of export: a checkpoint's folder, or a --checkpoint_dir of servers, of which the newest complete one is taken; "
    "empty: the running job");
ABSL_FLAG(bool, checkpoint, false, "of shutdown: take a checkpoint before; if it fails, the job goes on");
ABSL_FLAG(int64_t, version, -1, "of export from a running job: exactly this version; -1: the newest");
ABSL_FLAG(bool, watch, false, "of status: again each second, until the job is over; into a pipe as lines");
ABSL_FLAG(bool, json, false, "of status: in JSON, in a line");
ABSL_FLAG(absl::Duration, max_idle, absl::ZeroDuration(),
          "of health: fail if a running job has made no version for so long; 0: do not ask");
ABSL_FLAG(std::string, http_listen, "127.0.0.1:0", "of view: where to show the page, HOST:PORT; port 0 picks one");
ABSL_FLAG(bool, insecure, false, "of view: let other machines see the page, too, without TLS or a password");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(10), "how long to try and to wait for an answer");

namespace ps {
namespace {

constexpr size_t kMaxShown = 256;

// A command, and what follows it on the line.
struct Command {
  const char* name;
  size_t least;
  size_t most;
  const char* arguments;  // In words; empty: none.
  const char* help;
};
constexpr Command kCommands[] = {
    {"health", 0, 0, "",
     "asks gRPC's health service whether this server is serving; exit status 0 if it is. With --max_idle also whether "
     "the job makes versions; else it says who is missing"},
    {"status", 0, 0, "",
     "the job, its shards and workers, and what the job is waiting for; with --watch once a second, until the job is "
     "over; with --json as /api/v1/job of the page"},
    {"workers", 0, 0, "", "a table of the workers and where their time goes, those first who hold up the others"},
    {"set", 1, SIZE_MAX, "NAME=VALUE…",
     "changes hyperparameters of a running job (learning_rate=0.01), on all shards at one version; schedule=NAME, with "
     "its lengths and the like, takes the place of the present schedule"},
    {"checkpoint", 0, 0, "", "takes a checkpoint now, and prints its path and version"},
    {"drain", 1, 1, "WORKER", "asks a worker, by name or rank, to end its step and leave; prints whom"},
    {"weights_hash", 0, 0, "", "the hash of the newest weights: of one version in bsp, of each shard's newest in asp"},
    {"export", 0, 0, "",
     "writes the whole model's weights to one safetensors file (--output), from the running job or from a checkpoint "
     "(--from)"},
    {"shutdown", 0, 0, "", "ends the job: servers and workers exit with status 0; with --checkpoint takes one before"},
    {"report", 1, SIZE_MAX, "DIR…", "a table that compares runs, from the metrics files in each folder"},
    {"view", 1, SIZE_MAX, "PATH…",
     "shows the page of a run, from metrics files or folders of them, also while they grow; other folders' runs beside "
     "it"},
    {"merge_traces", 1, SIZE_MAX, "FILE…",
     "puts the --trace_file of all processes of a job together, with aligned clocks (--output)"},
};

ProgramHelp Help() {
  ProgramHelp help = {.program = "ps_ctl",
                      .summary = "looks at a running job, changes and ends it, and compares finished ones"};
  for (const Command& command : kCommands) {
    help.commands.push_back({.name = command.name, .arguments = command.arguments, .help = command.help});
  }
  return help;
}

// INVALID_ARGUMENT if there is no such command, or what follows it is not what it takes.
absl::Status CheckCommand(const std::string& command, const std::vector<std::string>& rest) {
  if (command.empty()) return absl::InvalidArgumentError("expected a command");
  for (const Command& form : kCommands) {
    if (command != form.name) continue;
    if (rest.size() >= form.least && rest.size() <= form.most) return absl::OkStatus();
    const std::string given = Printable(absl::StrJoin(rest, " "), kMaxShown);
    return InvalidArgument(command, ": expected ", *form.arguments == '\0' ? "nothing" : form.arguments, " after it",
                           given.empty() ? "" : absl::StrCat(", not '", given, "'"));
  }
  return InvalidArgument("there is no command '", Printable(command, kMaxShown), "'");
}

constexpr absl::Duration kMaxTimeout = absl::Hours(24);
constexpr absl::Duration kMaxIdle = absl::Hours(24 * 365);

absl::Status PrintSet(JobCalls& calls, const v1::SetHyperparametersRequest& request) {
  PS_ASSIGN_OR_RETURN(const v1::SetHyperparametersReply reply, calls.Set(request));
  std::cout << DescribeChange(request, reply) << "\n";
  return absl::OkStatus();
}

absl::Status PrintCheckpoint(JobCalls& calls) {
  PS_ASSIGN_OR_RETURN(const v1::CheckpointReply reply, calls.Checkpoint());
  std::cout << reply.path() << " version " << reply.version() << "\n";
  return absl::OkStatus();
}

absl::Status PrintDrain(JobCalls& calls, const std::string& worker) {
  PS_ASSIGN_OR_RETURN(const v1::DrainReply reply, calls.Drain(worker));
  std::cout << "rank " << reply.rank() << " (" << reply.name() << " on " << reply.host() << ") is asked to leave\n";
  return absl::OkStatus();
}

absl::Status Shutdown(JobCalls& calls) {
  if (absl::GetFlag(FLAGS_checkpoint)) {
    const absl::Status taken = PrintCheckpoint(calls);
    if (IsJobShutDown(taken)) {  // By somebody else, meanwhile.
      std::cout << Message(taken) << "\n";
      return absl::OkStatus();
    }
    PS_RETURN_IF_ERROR(Annotate(
        taken, "nothing was ended, since no checkpoint could be taken (shutdown without --checkpoint takes none)"));
  }
  PS_ASSIGN_OR_RETURN(const v1::ShutdownReply reply, calls.Shutdown());
  std::cout << "job " << reply.job() << " is shut down\n";
  return absl::OkStatus();
}

// The chief's status, with all shards' addresses.
absl::StatusOr<v1::StatusReply> StatusWithShards(JobCalls& calls, bool layout) {
  absl::StatusOr<v1::StatusReply> status = calls.Status(layout);
  if (!status.ok()) return status;
  for (const v1::ShardInfo& info : status->shards()) {
    if (!info.address().empty()) continue;
    return Unavailable("shard ", info.shard(), " is not registered");
  }
  return status;
}

absl::Status PrintWeightsHash(JobCalls& calls, TimePoint deadline) {
  PS_ASSIGN_OR_RETURN(const v1::StatusReply status, StatusWithShards(calls, /*layout=*/false));
  HashJob job = {.channels = {}, .slices = 0, .one_version = status.synchronous(), .id = {}};
  for (const v1::ShardInfo& info : status.shards()) {
    job.channels.push_back(calls.ShardChannel(info));
    job.slices += static_cast<size_t>(info.slices_size());
  }
  if (job.slices == 0) return Unavailable("the job has no weights yet: ", status.waiting_for());
  PS_ASSIGN_OR_RETURN(const HashedWeights hashed, HashWeights(job, deadline, {}));
  const auto [lowest, newest] = std::minmax_element(hashed.versions.begin(), hashed.versions.end());
  std::cout << hashed.hash << " version " << *lowest;
  if (*lowest != *newest)
    std::cout << " to " << *newest << " (by shard: " << absl::StrJoin(hashed.versions, ", ") << ")";
  std::cout << "\n";
  return absl::OkStatus();
}

absl::StatusOr<std::string> ExportServed(JobCalls& calls, const std::string& output) {
  PS_ASSIGN_OR_RETURN(const v1::StatusReply status, StatusWithShards(calls, /*layout=*/true));
  ServedModel served = {.shards = {}, .one_version = status.synchronous()};
  for (const v1::ShardInfo& info : status.shards()) {
    served.shards.push_back({.channel = calls.ShardChannel(info), .address = calls.ShardAddress(info)});
  }
  const int64_t version = absl::GetFlag(FLAGS_version);
  return ExportJob(status, served, version < 0 ? std::nullopt : std::optional<uint64_t>(static_cast<uint64_t>(version)),
                   ToChrono(absl::GetFlag(FLAGS_timeout)), output);
}

absl::Status Export(JobCalls& calls) {
  const std::string output = absl::GetFlag(FLAGS_output);
  const std::string checkpoint = absl::GetFlag(FLAGS_from);
  const absl::StatusOr<std::string> done =
      checkpoint.empty() ? ExportServed(calls, output) : ExportCheckpoint(checkpoint, output);
  if (done.ok()) std::cout << *done << "\n";
  return done.status();
}

// Flags of one command, which mean nothing to others.
void CheckCommandFlags(const CommandLine& line, const std::string& command, Problems& problems) {
  const bool exports = command == "export";
  const bool merges = command == "merge_traces";
  const bool views = command == "view";
  problems.Check(!exports || !absl::GetFlag(FLAGS_output).empty(), "--output: expected the file to export to");
  problems.CheckRange("max_idle", absl::GetFlag(FLAGS_max_idle), absl::ZeroDuration(), kMaxIdle);
  problems.Check(!merges || !absl::GetFlag(FLAGS_output).empty(), "--output: expected the file to write the trace to");
  if (views) {
    Endpoint listen;
    const std::string http_listen = absl::GetFlag(FLAGS_http_listen);
    problems.Read(ParseEndpoint("http_listen", http_listen), listen);
    problems.Check(!listen.is_unix(), "--http_listen=", http_listen, ": expected HOST:PORT");
    problems.Check(listen.host.empty() || listen.is_local() || absl::GetFlag(FLAGS_insecure),
                   "--http_listen=", http_listen,
                   ": the page could be seen from other machines, without TLS or a password; add --insecure if the "
                   "network is trusted");
  }
  problems.Check(absl::GetFlag(FLAGS_version) >= -1, "--version: expected a version, or -1");
  const bool stored = exports && !absl::GetFlag(FLAGS_from).empty();
  problems.Check(CheckIdleFlags(line, {{"output", !exports && !merges, "only export and merge_traces write a file"},
                                       {"server", merges, "traces are read without a server"},
                                       {"server", views, "metrics files are read without a server"},
                                       {"http_listen", !views, "only view shows a page"},
                                       {"insecure", !views, "only view shows a page"},
                                       {"from", !exports, "only export reads a checkpoint"},
                                       {"version", !exports, "only export takes a version"},
                                       {"version", stored, "the checkpoint says which version it has"},
                                       {"server", stored, "a checkpoint is read without a server"},
                                       {"watch", command != "status", "only status is watched"},
                                       {"json", command != "status", "only status is told in JSON"},
                                       {"max_idle", command != "health", "only health looks at it"},
                                       {"checkpoint", command != "shutdown", "only shutdown takes one before"}}));
}

absl::Status PrintHealth(JobCalls& calls, const std::string& server) {
  PS_ASSIGN_OR_RETURN(const std::string health, calls.Health());
  if (health != "SERVING") {
    std::cout << health << "\n";
    return Unavailable("--server=", server, ": not serving");
  }
  const absl::Duration max_idle = absl::GetFlag(FLAGS_max_idle);
  if (max_idle > absl::ZeroDuration()) {
    PS_ASSIGN_OR_RETURN(const v1::StatusReply status, calls.Status());
    PS_ASSIGN_OR_RETURN(const std::string progress, CheckIdle(status, max_idle));
    std::cout << health << ": " << progress << "\n";
    return absl::OkStatus();
  }
  std::cout << health << "\n";
  return absl::OkStatus();
}

absl::Status PrintJobStatus(JobCalls& calls) {
  const bool json = absl::GetFlag(FLAGS_json);
  if (absl::GetFlag(FLAGS_watch)) {
    return WatchStatus(calls, json                         ? WatchForm::kJson
                              : isatty(STDOUT_FILENO) == 1 ? WatchForm::kScreen
                                                           : WatchForm::kLines);
  }
  if (!json) return PrintStatus(calls);
  PS_ASSIGN_OR_RETURN(const v1::StatusReply status, calls.Status());
  std::cout << JsonText(JobJson(status)) << "\n";
  return absl::OkStatus();
}

absl::Status PrintWorkersTable(JobCalls& calls) {
  PS_ASSIGN_OR_RETURN(const v1::StatusReply status, calls.Status());
  std::cout << WorkersTable(status, SIZE_MAX);
  return absl::OkStatus();
}

absl::Status View(const std::vector<std::string>& paths) {
  PS_ASSIGN_OR_RETURN(const Endpoint listen, ParseEndpoint("http_listen", absl::GetFlag(FLAGS_http_listen)));
  return ViewRuns(listen, paths);
}

absl::Status PrintMerged(const std::vector<std::string>& traces) {
  PS_ASSIGN_OR_RETURN(const std::string done, MergeTraces(traces, absl::GetFlag(FLAGS_output)));
  std::cout << done;
  return absl::OkStatus();
}

absl::Status PrintReport(const std::vector<std::string>& folders) {
  std::vector<RunSummary> runs;
  for (const std::string& folder : folders) {
    PS_ASSIGN_OR_RETURN(RunSummary run, SummarizeRun(folder));
    runs.push_back(std::move(run));
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
  if (!StartProgram(argc, argv, Help(), "worker/ctl/main.cc", &line, &exit_status)) return exit_status;
  const std::string command = line.arguments.empty() ? "" : line.arguments.front();
  const std::vector<std::string> rest(line.arguments.begin() + (command.empty() ? 0 : 1), line.arguments.end());
  if (const absl::Status known = CheckCommand(command, rest); !known.ok()) {
    return Complain("ps_ctl", InvalidArgument(Message(known), "\n", HelpText(Help())), kExitUsage);
  }
  const std::string server = absl::GetFlag(FLAGS_server);
  const absl::Duration timeout = absl::GetFlag(FLAGS_timeout);
  Problems problems;
  problems.Check(ParseEndpoint("server", server).status());
  problems.CheckPositive("timeout", timeout, kMaxTimeout);
  CheckCommandFlags(line, command, problems);
  v1::SetHyperparametersRequest request;
  if (command == "set") problems.Read(ParseAssignments(rest), request);
  if (const absl::Status valid = problems.ToStatus(); !valid.ok()) return Complain("ps_ctl", valid, kExitUsage);
  InitLogging("ps_ctl");
  JobCalls calls(server, timeout);
  absl::Status status = command == "report"         ? PrintReport(rest)
                        : command == "merge_traces" ? PrintMerged(rest)
                        : command == "view"         ? View(rest)
                        : command == "health"       ? PrintHealth(calls, server)
                        : command == "status"       ? PrintJobStatus(calls)
                        : command == "workers"      ? PrintWorkersTable(calls)
                        : command == "export"       ? Export(calls)
                        : command == "set"          ? PrintSet(calls, request)
                        : command == "shutdown"     ? Shutdown(calls)
                        : command == "checkpoint"   ? PrintCheckpoint(calls)
                        : command == "drain"        ? PrintDrain(calls, rest.front())
                                                    : PrintWeightsHash(calls, Now() + ToChrono(timeout));
  status.Update(FlushOutput());
  return status.ok() ? kExitDone : Complain("ps_ctl", status, kExitFailed);
}
