// The sockets that a server listens on. It accepts connections itself and hands them to gRPC: gRPC's own listener stops
// for ever at the first connection for which there is no descriptor (on_read in tcp_server_posix.cc, as of gRPC 1.51),
// and has no limit on connections.
//
// When the process has few descriptors left, a caller that comes is sent away instead of kept waiting; those that are
// left are for files, and for members' shared memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/server_builder.h>
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/files.h"

namespace ps {

class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Listens; callers wait until Start. A name that has several addresses is listened on at each of them. Port 0 picks
  // one. `silence`: as SetServerArguments'. UNAVAILABLE, naming the flag, if that cannot be. A path where something
  // is must be nobody else's (UnixLock); what is there is replaced. Connections use the descriptors below
  // `max_connections`, however many there may be: each costs memory, too.
  static absl::StatusOr<std::unique_ptr<Listener>> Listen(const std::string& flag, const Endpoint& endpoint,
                                                          std::chrono::nanoseconds silence,
                                                          uint64_t max_connections = kMaxConnections);
  static constexpr uint64_t kMaxConnections = 16384;
  ~Listener();

  // What it listens on, with the real port.
  const Endpoint& endpoint() const { return endpoint_; }

  // Once: from now on, on a thread of its own, connections are handed to the acceptor. `on_room` is told when there is
  // no more room for connections (false), and when there is again.
  void Start(std::unique_ptr<Acceptor> acceptor, std::function<void(bool)> on_room);
  // Closes the sockets: nobody is taken in any more. Any number of times.
  void Stop();

 private:
  Listener(Endpoint endpoint, std::vector<FileDescriptor> sockets, FileDescriptor stop, uint64_t max_connections);
  void Run();
  // Takes in the callers who wait at this socket.
  void AcceptFrom(int socket);
  // Sends the caller away if there is no room; else gives the connection to gRPC.
  void Take(FileDescriptor connection, int socket);
  void OnFull(const std::string& why);
  // Whether one more connection would leave enough descriptors.
  bool HasRoom() const;
  // Connections have the descriptors below this number.
  uint64_t FirstReserved() const;
  std::string WhyFull() const;

  const Endpoint endpoint_;
  const uint64_t max_connections_;
  std::vector<FileDescriptor> sockets_;
  const FileDescriptor stop_;  // An eventfd.
  std::unique_ptr<Acceptor> acceptor_;
  std::function<void(bool)> on_room_;
  // Only the thread uses these.
  bool full_ = false;
  bool out_of_descriptors_ = false;  // So it was at the last caller.
  TimePoint warn_at_;                // It does not warn before.
  uint64_t unsaid_ = 0;              // So many were sent away since the last warning.
  std::thread thread_;
};

// Raises this process's limit of open descriptors to the most that it may have (Debian gives programs 1,024, and lets
// them have more). For programs: it holds for the whole process.
void RaiseDescriptorLimit();

// A Unix socket's path belongs to one server. gRPC removes an existing socket at the path before it binds, so a second
// server would take the path over, and the first would go on running unreachable.
//
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
  UnixLock(std::string lock_path, FileDescriptor file) : lock_path_(std::move(lock_path)), file_(std::move(file)) {}
  const std::string lock_path_;
  const FileDescriptor file_;
};

}  // namespace ps
