// A ps_server beside ps_bench's own program, as a process that can be killed.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"

namespace ps {

// Killed and reaped at the latest when it goes out of scope.
class ServerProcess {
 public:
  // Returns when it has printed the address that it listens on.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::vector<std::string>& flags);
  ~ServerProcess() { Kill(); }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& address() const { return address_; }
  TimePoint listening_since() const { return listening_since_; }
  // SIGKILL; returns when it is gone.
  void Kill();
  // Waits until it ends by itself. INTERNAL if that is not with exit status 0.
  absl::Status Wait();

 private:
  ServerProcess() = default;

  pid_t pid_ = -1;
  std::string address_;
  TimePoint listening_since_;
};

}  // namespace ps
