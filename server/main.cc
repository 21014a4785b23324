// ps_server: holds a shard of a model's weights and applies what workers push.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <stop_token>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/grpc_log.h"
#include "common/program.h"
#include "common/status.h"
#include "common/sync.h"
#include "server/flags.h"
#include "server/listener.h"
#include "server/server.h"

namespace {

constexpr std::chrono::seconds kDiskTime(2);   // For what is under way when a server ends.
constexpr std::chrono::seconds kStartTime(5);  // To leave what a start waits for, once a stop was asked for.

// Whether the server's disk has done what it was at. One that hangs is not waited for by a process that ends; one that
// goes back to a checkpoint on that disk waits, as others would wait for it.
bool EndDisk(ps::Server& server, const ps::ServerOptions& options, const std::stop_token& stop) {
  if (server.EndDisk(kDiskTime)) return true;
  const ps::TimePoint deadline = ps::Now() + ps::ToChrono(options.server_timeout);
  spdlog::warn("--checkpoint_dir={}: the file system does not answer; {}", options.checkpoint_dir,
               server.rolled_back() ? "going back to a checkpoint waits for it (--server_timeout)"
                                    : "ending without what was being written");
  while (server.rolled_back() && !stop.stop_requested() && ps::Now() < deadline) {
    if (server.EndDisk(std::chrono::milliseconds(100))) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace ps;  // NOLINT(google-build-using-namespace): this file is the program.
  CommandLine line;
  int exit_status = kExitDone;
  if (!StartProgram(argc, argv, "ps_server [flags]: holds a shard of a model's weights and trains it",
                    "server/flags.cc", &line, &exit_status)) {
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
    spdlog::warn("the start hangs, perhaps in the file system of --checkpoint_dir={}; ending", options.checkpoint_dir);
    std::_Exit(kExitFailed);
  });
  // Each generation of the job is a server of its own.
  Lineage lineage;
  while (true) {
    absl::StatusOr<std::unique_ptr<Server>> server =
        Server::Start(options, ServerFlagValues(), stop.get_token(), &lineage);
    {
      MutexLock lock(mutex);
      started = true;
    }
    changed.NotifyAll();
    if (!server.ok()) return Complain("ps_server", server.status(), kExitFailed);
    if (!lineage.again) std::cout << "listening on " << (*server)->address() << std::endl;
    {
      MutexLock lock(mutex);
      running = server->get();
      if (!stopped.empty()) running->Stop(stopped);
    }
    const absl::Status ended = (*server)->Wait();
    if (!EndDisk(**server, options, stop.get_token())) {
      std::cout.flush();
      std::_Exit((*server)->rolled_back() || !ended.ok() ? Complain("ps_server", ended, kExitFailed) : kExitDone);
    }
    {
      MutexLock lock(mutex);
      running = nullptr;
      started = false;
    }
    if (!(*server)->rolled_back()) return ended.ok() ? kExitDone : Complain("ps_server", ended, kExitFailed);
    lineage.again = true;
  }
}
