// ps_server: holds a shard of a model's weights and applies what workers push.
#include <iostream>
#include <stop_token>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/grpc_log.h"
#include "common/program.h"
#include "common/status.h"
#include "server/flags.h"
#include "server/listener.h"
#include "server/server.h"

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
  Server* running = nullptr;
  std::string stopped;  // Why, if it was.
  std::stop_source stop;
  const StopSignal stop_signal([&](const std::string& signal) {
    spdlog::info("{}: stopping", signal);
    MutexLock lock(mutex);
    stopped = absl::StrCat("server ", options.shard, " was stopped (", signal, ")");
    stop.request_stop();
    if (running != nullptr) running->Stop(stopped);
  });
  // Each generation of the job is a server of its own.
  Lineage lineage;
  while (true) {
    absl::StatusOr<std::unique_ptr<Server>> server =
        Server::Start(options, ServerFlagValues(), stop.get_token(), &lineage);
    if (!server.ok()) return Complain("ps_server", server.status(), kExitFailed);
    if (!lineage.again) std::cout << "listening on " << (*server)->address() << std::endl;
    {
      MutexLock lock(mutex);
      running = server->get();
      if (!stopped.empty()) running->Stop(stopped);
    }
    const absl::Status ended = (*server)->Wait();
    {
      MutexLock lock(mutex);
      running = nullptr;
    }
    if (!(*server)->rolled_back()) return ended.ok() ? kExitDone : Complain("ps_server", ended, kExitFailed);
    lineage.again = true;
  }
}
