// ps_server: holds a shard of a model's weights and applies what workers push.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/program.h"
#include "common/status.h"
#include "common/sync.h"
#include "server/config/flags.h"
#include "server/page/job_page.h"
#include "server/server.h"
#include "server/transport/listener.h"

namespace {

constexpr std::chrono::seconds kDiskTime(2);     // What is under way when a server ends is waited for silently so long.
constexpr std::chrono::seconds kHangingDisk(5);  // It has read and written nothing for so long.
constexpr std::chrono::seconds kStartTime(5);    // A start has so long to leave what it waits for, once it is to stop.

// Whether the server's disk has done what it was at. A process that ends waits for it as long as it goes on, so that no
// part is left half written for nothing, and not for one that hangs; one that goes back to a checkpoint on that disk
// waits for --server_timeout, as others would wait for it.
bool EndDisk(ps::Server& server, const ps::ServerOptions& options, const std::stop_token& stop) {
  if (server.EndDisk(kDiskTime)) return true;
  const ps::TimePoint deadline = ps::Now() + ps::ToChrono(options.server_timeout);
  spdlog::info("--checkpoint_dir={}: waiting for what is being written or read there {}", options.checkpoint_dir,
               server.rolled_back() ? "(--server_timeout)" : "as long as it goes on");
  ps::DiskSilence silence;
  while (!server.EndDisk(std::chrono::milliseconds(100))) {
    const ps::TimePoint now = ps::Now();
    const std::chrono::nanoseconds silent = silence.Look(server.disk_bytes(), now);
    if (server.rolled_back() ? now < deadline && !stop.stop_requested() : silent < kHangingDisk) continue;
    spdlog::warn("--checkpoint_dir={}: what was under way there has not ended, and nothing was written or read for {}",
                 options.checkpoint_dir, ps::FormatSeconds(silent));
    return false;
  }
  return true;
}

// What a start that does not end hangs in.
std::string HangsIn(ps::StartPhase phase, const ps::ServerOptions& options) {
  switch (phase) {
    case ps::StartPhase::kFiles: {
      std::vector<std::string> files;
      if (!options.checkpoint_dir.empty()) files.push_back("--checkpoint_dir=" + options.checkpoint_dir);
      if (!options.metrics_file.empty()) files.push_back("--metrics_file=" + options.metrics_file);
      return absl::StrCat("the file system of ", absl::StrJoin(files, " or "));
    }
    case ps::StartPhase::kListening:
      return absl::StrCat("listening at --listen=", options.listen, " (perhaps in looking up that name)");
    case ps::StartPhase::kJoining:
      return absl::StrCat("joining --chief=", options.chief);
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, {.program = "ps_server", .summary = "holds a shard of a model's weights and trains it"},
                    "server/config/flags.cc", &line, &exit_status)) {
    return exit_status;
  }
  const ServerOptions options = ServerOptionsFromFlags();
  absl::Status valid = ValidateServerOptions(options);
  if (valid.ok() && !line.arguments.empty()) {
    valid = absl::InvalidArgumentError(line.arguments.front() + ": not a flag; flags begin with --");
  }
  if (valid.ok()) valid = CheckServerFlags(line);
  if (!valid.ok()) return Complain("ps_server", valid, kExitUsage);

  KeepFreedMemory();
  InitLogging("ps_server");
  RouteGrpcLog();
  RaiseDescriptorLimit();
  Mutex mutex;
  CondVar changed;
  bool started = false;  // Or it could not be.
  Server* running = nullptr;
  std::string stopped;  // Why, if it was.
  std::stop_source stop;
  std::atomic<StartPhase> phase = StartPhase::kFiles;
  const StopSignal stop_signal([&](const std::string& signal) {
    spdlog::info("{}: stopping", signal);
    MutexLock lock(mutex);
    stopped = absl::StrCat("server ", options.shard, " was stopped (", signal, ")");
    stop.request_stop();
    if (running != nullptr) return running->Stop(stopped);
    // It is starting. A file system that hangs lets nobody go.
    const TimePoint deadline = Now() + kStartTime;
    while (!started && Now() < deadline) changed.WaitUntil(mutex, deadline);
    if (started) return;
    const absl::Status hangs =
        absl::DeadlineExceededError("the start hangs in " + HangsIn(phase, options) + "; ending");
    std::_Exit(Complain("ps_server", hangs, kExitFailed));
  });
  std::unique_ptr<JobPage> page;  // It shows one generation after the other.
  if (!options.http_listen.empty()) {
    absl::StatusOr<std::unique_ptr<JobPage>> made = JobPage::Start(options);
    if (!made.ok()) return Complain("ps_server", made.status(), kExitFailed);
    page = *std::move(made);
  }
  // Each generation of the job is a server of its own.
  Lineage lineage;
  while (true) {
    absl::StatusOr<std::unique_ptr<Server>> server =
        Server::Start(options, ServerFlagValues(), stop.get_token(), &lineage, &phase, page.get());
    {
      MutexLock lock(mutex);
      started = true;
    }
    changed.NotifyAll();
    if (!server.ok()) return Complain("ps_server", server.status(), kExitFailed);
    if (!lineage.again) std::cout << "listening on " << (*server)->address() << std::endl;
    if (!lineage.again && page != nullptr) std::cout << "page at " << page->address() << std::endl;
    {
      MutexLock lock(mutex);
      running = server->get();
      if (!stopped.empty()) running->Stop(stopped);
    }
    const absl::Status ended = (*server)->Wait();
    if (!EndDisk(**server, options, stop.get_token())) {
      std::cout.flush();
      FlushLog();
      std::_Exit((*server)->rolled_back() || !ended.ok() ? Complain("ps_server", ended, kExitFailed) : kExitDone);
    }
    {
      MutexLock lock(mutex);
      running = nullptr;
      started = false;
    }
    if (!(*server)->rolled_back() && page != nullptr) page->AwaitLastLook();
    if (!(*server)->rolled_back()) return ended.ok() ? kExitDone : Complain("ps_server", ended, kExitFailed);
    lineage.again = true;
  }
}
