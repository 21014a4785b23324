#include "tests/bench/server_process.h"

#include "absl/strings/strip.h"

namespace ps {

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(const std::vector<std::string>& flags) {
  std::unique_ptr<ServerProcess> server(new ServerProcess);
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start("ps_server", flags);
  if (!process.ok()) return process.status();
  server->process_ = *std::move(process);
  const std::string line = server->process_->ReadLine();
  server->listening_since_ = Now();
  absl::string_view address = line;
  if (!absl::ConsumePrefix(&address, "listening on "))
    return absl::InternalError("ps_server did not start: " + server->process_->LastWords());
  server->address_ = std::string(address);
  return server;
}

}  // namespace ps
