// A Unix socket's path belongs to one server. gRPC removes an existing socket at the path before it binds, so a second
// server would take the path over, and the first would go on running unreachable.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ps {

// Holds PATH for as long as it lives, by a lock on the file PATH.lock, which it makes, and removes in the end. The
// system releases the lock of a process that is killed; its socket and lock file do not prevent a new start. Made
// before the socket and destroyed after it. Used by one thread.
class UnixLock {
 public:
  // Waits for nobody. FAILED_PRECONDITION, beginning with `flag` (--listen=unix:PATH), if somebody listens at the path
  // or is about to; INVALID_ARGUMENT if there is something else than a socket, the path is too long for one, or the
  // lock cannot be made.
  static absl::StatusOr<std::unique_ptr<UnixLock>> Take(const std::string& flag, const std::string& path);
  ~UnixLock();
  UnixLock(const UnixLock&) = delete;
  UnixLock& operator=(const UnixLock&) = delete;

 private:
  UnixLock(std::string lock_path, int file) : lock_path_(std::move(lock_path)), file_(file) {}
  const std::string lock_path_;
  const int file_;
};

}  // namespace ps
