#include "tests/bench/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

extern char** environ;

namespace ps {
namespace {

constexpr std::chrono::milliseconds kLongestWait = std::chrono::minutes(15);

// False if nothing came for so long.
bool IsReadable(int descriptor) {
  pollfd wanted = {.fd = descriptor, .events = POLLIN, .revents = 0};
  return poll(&wanted, 1, static_cast<int>(kLongestWait.count())) == 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const std::string& program,
                                                                  const std::vector<std::string>& flags,
                                                                  const std::vector<std::string>& before) {
  std::error_code error;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / program;
  std::vector<std::string> arguments = before;
  arguments.push_back(path);
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::array<int, 2> in = {-1, -1};
  std::array<int, 2> out = {-1, -1};
  if (pipe2(in.data(), O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no pipe can be made");
  const FileDescriptor in_read(in[0]);
  std::unique_ptr<ChildProcess> child(new ChildProcess(program));
  child->in_ = FileDescriptor(in[1]);
  if (pipe2(out.data(), O_CLOEXEC) != 0) return absl::ResourceExhaustedError("no pipe can be made");
  const FileDescriptor out_write(out[1]);
  child->out_ = FileDescriptor(out[0]);
  child->err_ = FileDescriptor(memfd_create("stderr", MFD_CLOEXEC));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in_read.get(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out_write.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, child->err_.get(), STDERR_FILENO);
  // It gets the signals that this program may have blocked.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int spawned = posix_spawnp(&child->pid_, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (spawned == 0) return child;
  child->pid_ = -1;
  return absl::InternalError(absl::StrCat(argv[0], ": cannot be started: ", strerror(spawned)));
}

ChildProcess::~ChildProcess() { Kill(); }

std::string ChildProcess::LastWords() const {
  constexpr off_t kMost = 4096;
  const off_t end = lseek(err_.get(), 0, SEEK_END);
  std::string text(static_cast<size_t>(std::min(std::max<off_t>(end, 0), kMost)), '\0');
  const ssize_t got = pread(err_.get(), text.data(), text.size(), std::max<off_t>(end - kMost, 0));
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  absl::StripTrailingAsciiWhitespace(&text);
  return text.substr(text.rfind('\n') + 1);  // npos + 1 is 0.
}

std::string ChildProcess::ReadLine() const {
  std::string line;
  char next = 0;
  while (IsReadable(out_.get()) && read(out_.get(), &next, 1) == 1) {
    if (next == '\n') return line;
    line.push_back(next);
  }
  return "";
}

void ChildProcess::WriteLine(const std::string& line) const {
  (void)!write(in_.get(), (line + "\n").data(), line.size() + 1);
}

void ChildProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

double ChildProcess::ProcessorSeconds() const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // Behind the name, which may have spaces, the 12th and 13th: proc(5).
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  const std::vector<std::string> fields = absl::StrSplit(text.substr(name_end + 1), ' ', absl::SkipEmpty());
  int64_t ticks = 0;
  for (const size_t field : {11, 12}) {
    int64_t value = 0;
    if (field < fields.size() && absl::SimpleAtoi(fields[field], &value)) ticks += value;
  }
  return static_cast<double>(ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void ChildProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

absl::Status ChildProcess::Wait() {
  // Readable when it has ended: pidfd_open(2).
  const FileDescriptor end(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  if (end.valid() && !IsReadable(end.get())) {
    Kill();
    return absl::DeadlineExceededError(absl::StrCat(program_, " does not end: ", LastWords()));
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(program_, " did not end well: ", LastWords()));
}

}  // namespace ps
