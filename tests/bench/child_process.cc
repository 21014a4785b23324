#include "tests/bench/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

extern char** environ;

namespace ps {

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const std::string& program,
                                                                  const std::vector<std::string>& flags) {
  std::error_code error;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / program;
  std::vector<std::string> arguments = {path};
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
  std::unique_ptr<ChildProcess> child(new ChildProcess(program));
  child->out_ = out[0];
  const int spawned = posix_spawn(&child->pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  if (spawned != 0) return absl::InternalError(absl::StrCat(path, ": cannot be started"));
  return child;
}

ChildProcess::~ChildProcess() {
  Kill();
  close(out_);
}

std::string ChildProcess::ReadLine() const {
  std::string line;
  char next = 0;
  while (read(out_, &next, 1) == 1 && next != '\n') line.push_back(next);
  return line;
}

void ChildProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void ChildProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

absl::Status ChildProcess::Wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(program_, " did not end well"));
}

}  // namespace ps
