// A connection between two processes of one host and of one user, for short messages and descriptors of files: how
// processes get to memory that they share, and how each learns of the other's end.
//
// Unix sockets of type SOCK_SEQPACKET, unix(7). An address is a path, or "@name": a name that belongs to no file
// system, and that only processes in the same network namespace find.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/files.h"

namespace ps {

// Movable; closed with it. Send and Receive may each be called on a thread of their own. Errors name the address.
class LocalSocket {
 public:
  struct Message {
    std::string text;
    std::vector<FileDescriptor> files;
  };

  // UNAVAILABLE: nobody listens there; DEADLINE_EXCEEDED: nobody accepted in time; PERMISSION_DENIED: who listens is of
  // another user, or may not be reached; INVALID_ARGUMENT: it is no address; RESOURCE_EXHAUSTED: too many files are
  // open.
  static absl::StatusOr<LocalSocket> Connect(const std::string& address, TimePoint deadline);

  LocalSocket() = default;

  // Sends at least one byte, at most kLongest, with at most kMostFiles files, which stay the caller's. UNAVAILABLE: the
  // other side has closed or has ended; DEADLINE_EXCEEDED: it does not read.
  absl::Status Send(std::string_view text, std::span<const int> files, TimePoint deadline);
  // The next message; nothing: the other side has closed or has ended. DEADLINE_EXCEEDED: there is none;
  // INVALID_ARGUMENT: it breaks these limits, or brings more files than this process may have open.
  absl::StatusOr<std::optional<Message>> Receive(TimePoint deadline);
  // Ends both directions: a Receive that waits returns, here and there. From any thread.
  void Shutdown();

  int descriptor() const { return file_.get(); }

  static constexpr size_t kLongest = 64 << 10;
  static constexpr size_t kMostFiles = 64;

 private:
  friend class LocalListener;
  LocalSocket(FileDescriptor file, std::string address) : file_(std::move(file)), address_(std::move(address)) {}
  absl::Status CheckUser() const;

  FileDescriptor file_;
  std::string address_;
};

// Movable.
class LocalListener {
 public:
  // Listens at a path (where nothing may be: see UnixLock), or, if `address` is empty, at a new name.
  // FAILED_PRECONDITION if it is taken, INVALID_ARGUMENT if it is no address.
  static absl::StatusOr<LocalListener> Listen(const std::string& address);

  LocalListener(LocalListener&& other) noexcept = default;
  LocalListener& operator=(LocalListener&& other) noexcept = default;
  // Removes the path.
  ~LocalListener();

  const std::string& address() const { return address_; }
  int descriptor() const { return file_.get(); }

  // DEADLINE_EXCEEDED: nobody came; PERMISSION_DENIED: somebody of another user did, and was sent away; CANCELLED: it
  // was shut down.
  absl::StatusOr<LocalSocket> Accept(TimePoint deadline);
  // An Accept that waits returns, and so do later ones. From any thread.
  void Shutdown();

 private:
  LocalListener(FileDescriptor file, std::string address) : file_(std::move(file)), address_(std::move(address)) {}

  FileDescriptor file_;
  std::string address_;
};

}  // namespace ps
