// The real programs, as tests run them.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "common/clock.h"
#include "tests/integration/cluster.h"
#include "tests/temp_folder.h"

extern char** environ;

namespace ps {

// A program under test: what it prints is in output.out and output.err, or its stderr is the descriptor `errors`.
// Killed and reaped at the latest when it goes out of scope.
class Process {
 public:
  Process(const std::string& program, std::vector<std::string> arguments, const std::string& output, int errors = -1)
      : output_(output) {
    arguments.insert(arguments.begin(), PS_BIN_DIR "/" + program);
    std::vector<char*> argv;
    argv.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, (output + ".out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (errors >= 0) {
      posix_spawn_file_actions_adddup2(&actions, errors, 2);
    } else {
      posix_spawn_file_actions_addopen(&actions, 2, (output + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    }
    REQUIRE(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // A process that is stopped (SIGSTOP) does nothing any more when this returns.
  void Signal(int signal) const {
    kill(pid_, signal);
    siginfo_t stopped = {};
    if (signal == SIGSTOP) waitid(P_PID, static_cast<id_t>(pid_), &stopped, WSTOPPED | WEXITED | WNOWAIT);
  }
  // The exit status, or 128 + the signal.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    const int ended = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (ended > 2 && ended < 128) std::cerr << Errors();  // None of ours: a sanitizer's, which says why.
    return ended;
  }
  std::string Output() const { return Read(".out"); }
  std::string Errors() const { return Read(".err"); }
  // Looks at a file until the text is in it, for at most 2 minutes.
  bool WaitFor(const std::string& ending, const std::string& text) const {
    Mutex mutex;
    CondVar never;
    MutexLock lock(mutex);
    for (const TimePoint deadline = Now() + std::chrono::minutes(2); Now() < deadline;) {
      if (Read(ending).find(text) != std::string::npos) return true;
      never.WaitUntil(mutex, Now() + std::chrono::milliseconds(10));
    }
    return false;
  }
  std::string Address() const {
    REQUIRE(WaitFor(".out", "\n"));
    const std::string line = Output();
    REQUIRE(line.rfind("listening on ", 0) == 0);
    return line.substr(13, line.find('\n') - 13);
  }

 private:
  std::string Read(const std::string& ending) const { return ReadFile(output_ + ending); }
  std::string output_;
  pid_t pid_ = -1;
};

// The servers of one job, which have these flags in common. Shard s prints to server-s, and writes server-s.jsonl.
class ServerProcesses {
 public:
  ServerProcesses(const TempFolder& folder, uint32_t shards, const std::vector<std::string>& flags) : folder_(folder) {
    for (uint32_t shard = 0; shard < shards; ++shard) {
      std::vector<std::string> arguments = {"--num_shards=" + std::to_string(shards),
                                            "--shard=" + std::to_string(shard), "--metrics_file=" + Metrics(shard)};
      if (shard > 0) arguments.push_back("--chief=" + addresses_[0]);
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      processes_.push_back(
          std::make_unique<Process>("ps_server", arguments, folder.File("server-" + std::to_string(shard))));
      addresses_.push_back(processes_[shard]->Address());
      arguments_.push_back(std::move(arguments));
    }
  }

  // Kills it, and starts it again at the same address, as a supervisor would. From then on it prints to server-s-again.
  void KillAndStartAgain(uint32_t shard) {
    processes_[shard]->Signal(SIGKILL);
    processes_[shard]->Wait();
    std::vector<std::string> arguments = arguments_[shard];
    arguments.push_back("--listen=" + addresses_[shard]);
    processes_[shard] =
        std::make_unique<Process>("ps_server", arguments, folder_.File("server-" + std::to_string(shard) + "-again"));
  }

  Process& operator[](uint32_t shard) const { return *processes_[shard]; }
  const std::string& chief() const { return addresses_[0]; }
  const std::string& address(uint32_t shard) const { return addresses_[shard]; }
  std::string Metrics(uint32_t shard) const { return folder_.File("server-" + std::to_string(shard) + ".jsonl"); }
  // All end well.
  void ExpectEnd() const {
    for (const auto& process : processes_) {
      const int status = process->Wait();
      INFO(process->Errors());
      CHECK(status == 0);
    }
  }

 private:
  const TempFolder& folder_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::string> addresses_;
  std::vector<std::vector<std::string>> arguments_;
};

inline const std::vector<std::string> kSmallJob = {
    "--model=mlp:20,8,4", "--dataset=synthetic:samples=400,features=20,classes=4", "--batch_size=20"};

inline std::vector<std::string> Worker(const std::string& server, std::vector<std::string> more) {
  more.push_back("--server=" + server);
  more.insert(more.end(), kSmallJob.begin(), kSmallJob.end());
  return more;
}

inline int RunOnce(const std::string& program, const std::vector<std::string>& arguments, std::string* errors) {
  const TempFolder folder;
  Process process(program, arguments, folder.File("p"));
  const int status = process.Wait();
  *errors = process.Errors();
  return status;
}

// The program's last words are one line that begins with its name and says `text`.
inline void CheckRefused(const std::string& program, const std::vector<std::string>& arguments,
                         const std::string& text) {
  const TempFolder folder;
  Process process(program, arguments, folder.File("p"));
  const int status = process.Wait();
  const std::string errors = process.Errors();
  INFO(program << ": " << errors);
  CHECK(status == 1);
  const size_t last = errors.rfind(program + ": ", errors.size());
  REQUIRE(last != std::string::npos);
  CHECK(errors.find('\n', last) == errors.size() - 1);
  CHECK(errors.find(text, last) != std::string::npos);
}

}  // namespace ps
