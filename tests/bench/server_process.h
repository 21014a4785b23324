// A ps_server beside ps_bench's own program.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "tests/bench/child_process.h"

namespace ps {

// Killed and reaped at the latest when it goes out of scope.
class ServerProcess {
 public:
  // Returns when it has printed the address that it listens on.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::vector<std::string>& flags);

  const std::string& address() const { return address_; }
  TimePoint listening_since() const { return listening_since_; }
  void Kill() { process_->Kill(); }
  absl::Status Wait() { return process_->Wait(); }

 private:
  ServerProcess() = default;

  std::unique_ptr<ChildProcess> process_;
  std::string address_;
  TimePoint listening_since_;
};

}  // namespace ps
