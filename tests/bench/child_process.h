// A program beside ps_bench's own, as a process that can be spoken to, stopped and killed.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/files.h"

namespace ps {

// Killed and reaped at the latest when it goes out of scope.
class ChildProcess {
 public:
  // A program in the folder of this one; what it writes to stderr is kept, and shown if it does not end well. `before`:
  // a command that executes the rest of its own command line.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(const std::string& program,
                                                             const std::vector<std::string>& flags,
                                                             const std::vector<std::string>& before = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // The next line that it prints; empty if it ends before, or prints none for a quarter of an hour.
  std::string ReadLine() const;
  // To its stdin. What can no longer be delivered is dropped.
  void WriteLine(const std::string& line) const;
  void Signal(int signal) const;
  // Processor time that it has used so far, user and system.
  double ProcessorSeconds() const;
  // SIGKILL; returns when it is gone.
  void Kill();
  // Waits until it ends by itself. INTERNAL, with the last that it wrote to stderr, if that is not with exit status 0.
  // DEADLINE_EXCEEDED, after SIGKILL, if it does not end for a quarter of an hour.
  absl::Status Wait();
  // The last line that it has written to stderr.
  std::string LastWords() const;
  const std::string& program() const { return program_; }

 private:
  explicit ChildProcess(std::string program) : program_(std::move(program)) {}

  const std::string program_;
  pid_t pid_ = -1;
  FileDescriptor in_;
  FileDescriptor out_;
  FileDescriptor err_;  // A file in memory.
};

}  // namespace ps
