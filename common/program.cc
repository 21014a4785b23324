#include "common/program.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <typeinfo>

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/line_writer.h"
#include "common/status.h"

namespace ps {

namespace {

constexpr size_t kMaxQueuedBytes = 1 << 20;  // Lines that wait for stderr take no more.
constexpr std::chrono::seconds kFlushTime(1);
constexpr char kLogPattern[] = "%Y-%m-%d %H:%M:%S.%e %L %n: %v";

std::string Formatted(spdlog::formatter& formatter, const spdlog::details::log_msg& message) {
  spdlog::memory_buf_t line;
  formatter.format(message, line);
  return {line.data(), line.size()};
}

// The one way to stderr, of the log and of complaints, so that they stay in order. Whoever holds it last, as the
// program ends, flushes it.
std::shared_ptr<LineWriter> StderrLines() {
  static const auto lines =
      std::make_shared<LineWriter>(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0), kMaxQueuedBytes, [](uint64_t count) {
        spdlog::pattern_formatter formatter(kLogPattern);
        const std::string text = absl::StrCat(count, " log lines were dropped here: stderr was not read in time");
        return Formatted(formatter, {"log", spdlog::level::warn, text});
      });
  return lines;
}

class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override { lines_->Write(Formatted(*formatter_, message)); }
  void flush_() override {}

 private:
  const std::shared_ptr<LineWriter> lines_ = StderrLines();
};

}  // namespace

void InitLogging(const std::string& program) {
  auto logger = std::make_shared<spdlog::logger>(program, std::make_shared<StderrSink>());
  logger->set_pattern(kLogPattern);
  spdlog::set_default_logger(std::move(logger));
}

void KeepFreedMemory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // The most that glibc takes (DEFAULT_MMAP_THRESHOLD_MAX).
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

void FlushLog() { (void)StderrLines()->Flush(Now() + kFlushTime); }

int Complain(const std::string& program, const absl::Status& status, int exit_status) {
  const std::shared_ptr<LineWriter> lines = StderrLines();
  const bool read = lines->Flush(Now() + kFlushTime);
  for (const auto& line : absl::StrSplit(Message(status), '\n')) lines->Write(absl::StrCat(program, ": ", line, "\n"));
  if (read) (void)lines->Flush(Now() + kFlushTime);
  return exit_status;
}

absl::Status FlushOutput() {
  if (std::cout.flush()) return absl::OkStatus();
  return absl::DataLossError("stdout: what was printed could not be written");
}

namespace {

// The type of the exception that is being handled, as it is written in C++ where there is the memory for that; empty:
// there is none.
const char* TypeOfException() {
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "";
  const char* const name = abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr);
  return name == nullptr ? type->name() : name;
}

// "PROGRAM: TEXTS", in one piece.
void WriteToStderr(const char* a, const char* b = "", const char* c = "", const char* d = "") {
  (void)dprintf(STDERR_FILENO, "%s: %s%s%s%s\n", program_invocation_short_name, a, b, c, d);
}

// Where a thread cannot be started or memory is used up, libraries throw, in any thread, what nobody is there to catch:
// one line says which it was. Everything else ends with a line that names the exception, and with a signal, so that
// debuggers have something to look at. Nothing here needs memory that may not be there.
[[noreturn]] void OnTerminate() {
  try {
    if (const std::exception_ptr thrown = std::current_exception(); thrown != nullptr) std::rethrow_exception(thrown);
    WriteToStderr("std::terminate was called");
  } catch (const std::bad_alloc&) {
    WriteToStderr("there is not enough memory (is it limited, as by ulimit -v or a control group?)");
    std::_Exit(kExitFailed);
  } catch (const std::filesystem::filesystem_error& error) {  // It is a system_error, too.
    WriteToStderr("uncaught ", TypeOfException(), ": ", error.what());
  } catch (const std::system_error& error) {
    WriteToStderr("the system refuses a thread or another resource: ", error.what(),
                  " (are threads or memory limited, as by ulimit -u or -v?)");
    std::_Exit(kExitFailed);
  } catch (const std::exception& error) {
    WriteToStderr("uncaught ", TypeOfException(), ": ", error.what());
  } catch (...) {
    WriteToStderr("uncaught ", TypeOfException());
  }
  std::abort();
}

void SecureDescriptors() {
  for (int standard = 0; standard <= 2; ++standard) {
    if (fcntl(standard, F_GETFD) < 0) (void)!open("/dev/null", O_RDWR);  // The lowest free number: this one.
  }
  (void)signal(SIGPIPE, SIG_IGN);
  (void)signal(SIGXFSZ,
               SIG_IGN);  // Memory that is shared counts as a file: where it may not be that large, that is an error.
}

}  // namespace

bool StartProgram(int argc, char** argv, ProgramHelp help, const std::string& source, CommandLine* line,
                  int* exit_status) {
  SecureDescriptors();
  std::set_terminate(OnTerminate);
  const std::string path = argv[0];
  const std::string program = path.substr(path.rfind('/') + 1);
  const absl::StatusOr<CommandLine> parsed = ParseCommandLine(argc, argv);
  if (!parsed.ok()) {
    *exit_status = Complain(program, parsed.status(), kExitUsage);
    return false;
  }
  *line = *parsed;
  *exit_status = kExitDone;
  help.flags = FlagsHelp(source);
  if (line->help) {
    std::cout << (line->help_form == "man"    ? ManPage(help, kVersion)
                  : line->help_form == "bash" ? BashCompletion(help)
                                              : HelpText(help));
  }
  if (line->version) std::cout << program << " " << kVersion << "\n";
  if (!line->help && !line->version) return true;
  if (const absl::Status written = FlushOutput(); !written.ok()) *exit_status = Complain(program, written, kExitFailed);
  return false;
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
