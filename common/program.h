// What all programs share: logs, signals, the command line.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "common/flag_parser.h"

namespace ps {

// Logs go to stderr, one line each: time, level, text. Logging never blocks: if stderr is not read in time, lines are
// dropped and counted (common/line_writer.h).
void InitLogging(const std::string& program);

// Lets the C library keep freed memory for the next message. By default it gives megabytes back to the system, which
// then hands them out page by page, zeroed: a push of 64 MB took 51 ms instead of 31 ms (ps_bench exchange --op=push).
// The process stays as large as its largest moment. Does nothing where the C library is not glibc.
void KeepFreedMemory();

// Parses the command line; answers --help and --version, and complains of bad flags. True to go on; false: return
// *exit_status from main. `help` says all but the flags, which are those that are defined in `source`. From then on a
// closed descriptor 0, 1 or 2 leads to /dev/null, so that no file that is opened later takes its place, and writing to
// a pipe without a reader is an error instead of the program's end.
bool StartProgram(int argc, char** argv, ProgramHelp help, const std::string& source, CommandLine* line,
                  int* exit_status);

// Waits until what was logged is written, for at most 1 s. For who ends the process without destructors, which do this
// otherwise.
void FlushLog();

// Writes out what the program has printed on stdout. DATA_LOSS if it cannot be written (a full disk, a reader that is
// gone).
absl::Status FlushOutput();

// Prints the status's lines to stderr as `program: line`, behind all that was logged, and returns `exit_status`. Waits
// for a reader for at most 2 s.
int Complain(const std::string& program, const absl::Status& status, int exit_status);

// From construction on, in every thread started later too, SIGINT and SIGTERM do nothing but call `on_signal` with the
// signal's name, on a thread of its own. A second one ends the program at once with status 1. From destruction on,
// which waits for a call that is being made, they do nothing: the program is about to end.
class StopSignal {
 public:
  explicit StopSignal(std::function<void(const std::string&)> on_signal);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

 private:
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

// The program's version, from CMake's project().
inline constexpr char kVersion[] = PS_VERSION;

}  // namespace ps
