#include "tests/bench/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

extern char** environ;

namespace ps {
namespace {

// Its first line, or nothing if it ends before.
std::string ReadLine(int descriptor) {
  std::string line;
  char next = 0;
  while (read(descriptor, &next, 1) == 1 && next != '\n') line.push_back(next);
  return line;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(const std::vector<std::string>& flags) {
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "ps_server";
  std::vector<std::string> arguments = {program};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::array<int, 2> out = {-1, -1};
  if (pipe2(out.data(), O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no pipe can be made");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::unique_ptr<ServerProcess> server(new ServerProcess);
  const int spawned = posix_spawn(&server->pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  const std::string line = spawned == 0 ? ReadLine(out[0]) : "";
  close(out[0]);
  server->listening_since_ = Now();
  absl::string_view address = line;
  if (!absl::ConsumePrefix(&address, "listening on ")) {
    return absl::InternalError(absl::StrCat(program, ": did not start"));
  }
  server->address_ = std::string(address);
  return server;
}

void ServerProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

absl::Status ServerProcess::Wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("ps_server at ", address_, " did not end well"));
}

}  // namespace ps
