#include "common/program.h"

#include <malloc.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_split.h"
#include "common/version.h"

namespace ps {

void InitLogging(const std::string& program) {
  auto logger = spdlog::stderr_logger_mt(program);
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %L %n: %v");
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
}

void KeepFreedMemory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // The most that glibc takes (DEFAULT_MMAP_THRESHOLD_MAX).
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

int Complain(const std::string& program, const absl::Status& status, int exit_status) {
  for (const auto& line : absl::StrSplit(status.message(), '\n')) {
    std::cerr << program << ": " << line << '\n';
  }
  return exit_status;
}

bool StartProgram(int argc, char** argv, const std::string& usage, const std::string& source, CommandLine* line,
                  int* exit_status) {
  const std::string path = argv[0];
  const std::string program = path.substr(path.rfind('/') + 1);
  const absl::StatusOr<CommandLine> parsed = ParseCommandLine(argc, argv);
  if (!parsed.ok()) {
    *exit_status = Complain(program, parsed.status(), kExitUsage);
    return false;
  }
  *line = *parsed;
  *exit_status = kExitDone;
  if (line->help) std::cout << HelpText(usage, source);
  if (line->version) std::cout << program << " " << kVersion << "\n";
  return !line->help && !line->version;
}

StopSignal::StopSignal(std::function<void(const std::string&)> on_signal) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  thread_ = std::thread([this, signals, on_signal = std::move(on_signal)] {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0 || ending_) return;
    on_signal(signal == SIGINT ? "SIGINT" : "SIGTERM");
    if (sigwait(&signals, &signal) == 0 && !ending_) std::_Exit(kExitFailed);
  });
}

StopSignal::~StopSignal() {
  ending_ = true;
  // Wakes it from sigwait; the signal is blocked, so it ends nothing.
  pthread_kill(thread_.native_handle(), SIGTERM);  // NOLINT(bugprone-bad-signal-to-kill-thread)
  thread_.join();
}

}  // namespace ps
