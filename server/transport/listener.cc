#include "server/transport/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr rlim_t kReserved = 128;    // Descriptors that are not for connections,
constexpr rlim_t kReservedPart = 4;  // but at most this part of all.
constexpr int kLookAgainMs = 100;    // While there is no room.
constexpr std::chrono::seconds kWarnOfRoomEvery(1);
constexpr int kMostWaiting = 4096;  // The system's own limit is less, or holds.

rlim_t DescriptorLimit() {
  rlimit limit = {};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

// How many descriptors may be open so that enough are left. The system gives the lowest that is free, so that a number
// says how many are open.
rlim_t FirstReservedOf(rlim_t limit) { return limit - std::min(kReserved, limit / kReservedPart); }

absl::Status NotHere(const std::string& flag, int error) {
  if (error == EADDRINUSE || error == EADDRNOTAVAIL) {
    return Unavailable(flag, ": the address is in use or does not belong to this machine");
  }
  return Unavailable(flag, ": ", std::strerror(error));
}

// The sockets' options as gRPC's own listener sets them; connections inherit those of TCP.
absl::StatusOr<FileDescriptor> ListenAt(const std::string& flag, const sockaddr* address, socklen_t bytes,
                                        int silence_ms) {
  FileDescriptor socket(::socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return NotHere(flag, errno);
  const int on = 1;
  const int off = 0;
  if (address->sa_family != AF_UNIX) {
    setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &silence_ms, sizeof silence_ms);
  }
  if (address->sa_family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(socket.get(), address, bytes) != 0) return NotHere(flag, errno);
  if (listen(socket.get(), kMostWaiting) != 0) return NotHere(flag, errno);
  return socket;
}

absl::StatusOr<FileDescriptor> ListenAtPath(const std::string& flag, const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Unavailable(flag, ": the path has more than ", sizeof address.sun_path - 1, " bytes");
  }
  std::copy(path.begin(), path.end(), address.sun_path);
  unlink(path.c_str());  // A server that was killed has left it.
  return ListenAt(flag, reinterpret_cast<const sockaddr*>(&address), sizeof address, 0);
}

int PortOf(int socket) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void SetPort(sockaddr* address, int port) {
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(static_cast<uint16_t>(port));
  }
}

absl::StatusOr<std::vector<FileDescriptor>> ListenAtHost(const std::string& flag, Endpoint& endpoint, int silence_ms) {
  // [::] takes callers of both families; where there is no IPv6, 0.0.0.0 takes those that there are.
  const bool any = endpoint.host == "0.0.0.0";
  for (const std::string& host :
       any ? std::vector<std::string>{"::", endpoint.host} : std::vector<std::string>{endpoint.host}) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE;
    addrinfo* found = nullptr;
    const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (error != 0) return Unavailable(flag, ": ", gai_strerror(error));
    const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
    std::vector<FileDescriptor> sockets;
    absl::Status why = absl::OkStatus();
    for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
      SetPort(each->ai_addr, endpoint.port);
      absl::StatusOr<FileDescriptor> socket = ListenAt(flag, each->ai_addr, each->ai_addrlen, silence_ms);
      if (!socket.ok()) {
        why.Update(socket.status());
        continue;
      }
      if (endpoint.port == 0) endpoint.port = PortOf(socket->get());  // The others have the same.
      sockets.push_back(*std::move(socket));
    }
    if (!sockets.empty()) {
      if (!why.ok()) spdlog::warn("{}; listening at the other addresses of {} only", Message(why), host);
      return sockets;
    }
    if (!any || host == endpoint.host) return why;
  }
  return absl::InternalError(flag);
}

constexpr int kTries = 100;  // Each of them found a lock file that its owner removed that moment.

// Whether the open file still has this name.
bool HasName(int file, const std::string& path) {
  struct stat open_file = {};
  struct stat named = {};
  return fstat(file, &open_file) == 0 && lstat(path.c_str(), &named) == 0 && open_file.st_dev == named.st_dev &&
         open_file.st_ino == named.st_ino;
}

// Whether somebody takes connections at the path. A listener whose queue is full is one, too.
bool Answers(const std::string& path) {
  const FileDescriptor probe(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 || errno == EAGAIN ||
         errno == EINPROGRESS || errno == EPROTOTYPE;  // The last: a socket of another type.
}

absl::Status CheckPath(const std::string& flag, const std::string& path) {
  struct stat about = {};
  if (lstat(path.c_str(), &about) != 0) return absl::OkStatus();
  if (!S_ISSOCK(about.st_mode)) return InvalidArgument(flag, ": ", path, " exists and is not a socket");
  if (!Answers(path)) return absl::OkStatus();  // What a killed server left; gRPC removes it.
  return FailedPrecondition(flag, ": another process is already listening there");
}

}  // namespace

void RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) spdlog::warn("ulimit -n: {}", std::strerror(errno));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Listen(const std::string& flag, const Endpoint& endpoint,
                                                           std::chrono::nanoseconds silence, uint64_t max_connections) {
  Endpoint bound = endpoint;
  std::vector<FileDescriptor> sockets;
  const int silence_ms = ServerSilenceMs(silence);
  if (endpoint.is_unix()) {
    PS_ASSIGN_OR_RETURN(FileDescriptor socket, ListenAtPath(flag, endpoint.unix_path));
    sockets.push_back(std::move(socket));
  } else {
    PS_ASSIGN_OR_RETURN(sockets, ListenAtHost(flag, bound, silence_ms));
  }
  FileDescriptor stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return NotHere(flag, errno);
  return std::unique_ptr<Listener>(new Listener(bound, std::move(sockets), std::move(stop), max_connections));
}

Listener::Listener(Endpoint endpoint, std::vector<FileDescriptor> sockets, FileDescriptor stop,
                   uint64_t max_connections)
    : endpoint_(std::move(endpoint)),
      max_connections_(max_connections),
      sockets_(std::move(sockets)),
      stop_(std::move(stop)) {}

Listener::~Listener() { Stop(); }

void Listener::Start(std::unique_ptr<Acceptor> acceptor, std::function<void(bool)> on_room) {
  acceptor_ = std::move(acceptor);
  on_room_ = std::move(on_room);
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    eventfd_write(stop_.get(), 1);
    thread_.join();
  }
  if (!sockets_.empty() && endpoint_.is_unix()) unlink(endpoint_.unix_path.c_str());
  sockets_.clear();
}

void Listener::Run() {
  std::vector<pollfd> polls;
  polls.push_back({.fd = stop_.get(), .events = POLLIN, .revents = 0});
  for (const FileDescriptor& socket : sockets_) polls.push_back({.fd = socket.get(), .events = POLLIN, .revents = 0});
  while (true) {
    // A caller who could not even be taken in to be sent away keeps its socket readable: the thread rests instead of
    // asking again and again, and callers wait meanwhile.
    const bool rests = std::exchange(out_of_descriptors_, false);
    const int ready = poll(polls.data(), rests ? 1 : polls.size(), full_ ? kLookAgainMs : -1);
    if (ready < 0 && errno != EINTR) {
      OnFull(std::strerror(errno));
      out_of_descriptors_ = true;
    }
    if (ready < 0) continue;
    if (polls.front().revents != 0) return;
    if (full_ && HasRoom()) {
      full_ = false;
      spdlog::info("there is room for connections again");
      on_room_(true);
    }
    for (size_t i = 1; i < polls.size(); ++i) {
      if (!rests && polls[i].revents != 0) AcceptFrom(polls[i].fd);
    }
  }
}

uint64_t Listener::FirstReserved() const {
  return std::min<uint64_t>(FirstReservedOf(DescriptorLimit()), max_connections_);
}

std::string Listener::WhyFull() const {
  const rlim_t limit = DescriptorLimit();
  if (FirstReservedOf(limit) > max_connections_) {
    return absl::StrCat("this server takes no more than ", max_connections_, " at a time");
  }
  return absl::StrCat("this process has ", FirstReservedOf(limit), " descriptors open, of ", limit,
                      " that it may have (ulimit -n)");
}

bool Listener::HasRoom() const {
  const FileDescriptor next(fcntl(stop_.get(), F_DUPFD_CLOEXEC, 0));
  return next.valid() && static_cast<uint64_t>(next.get()) < FirstReserved();
}

void Listener::AcceptFrom(int socket) {
  while (true) {
    FileDescriptor connection(accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.valid()) {
      Take(std::move(connection), socket);
      continue;
    }
    const int error = errno;
    if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
      out_of_descriptors_ = true;
      OnFull(std::strerror(error));
    }
    // What else there is concerns one caller who is gone again (accept(2)), or nobody waits.
    if (error != EINTR && error != ECONNABORTED) return;
  }
}

void Listener::Take(FileDescriptor connection, int socket) {
  if (static_cast<uint64_t>(connection.get()) >= FirstReserved()) {
    connection.Close();
    ++unsaid_;
    return OnFull(WhyFull());
  }
  Acceptor::NewConnectionParameters parameters;
  parameters.listener_fd = socket;
  parameters.fd = connection.Release();
  acceptor_->HandleNewConnection(&parameters);
}

void Listener::OnFull(const std::string& why) {
  if (!std::exchange(full_, true)) on_room_(false);
  if (Now() < warn_at_) return;
  warn_at_ = Now() + kWarnOfRoomEvery;
  spdlog::warn("no room for more connections: {}; {} callers were sent away", why, std::exchange(unsaid_, 0));
}

absl::StatusOr<std::unique_ptr<UnixLock>> UnixLock::Take(const std::string& flag, const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return InvalidArgument(flag, ": the path has ", path.size(), " bytes; a socket's has at most ",
                           sizeof(sockaddr_un::sun_path) - 1);
  }
  const std::string lock_path = path + ".lock";
  for (int tries = 0; tries < kTries; ++tries) {
    FileDescriptor file(open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (!file.valid()) return InvalidArgument(flag, ": ", lock_path, ": ", std::strerror(errno));
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return InvalidArgument(flag, ": ", lock_path, ": locking: ", std::strerror(errno));
      return FailedPrecondition(flag, ": another server is using this path");
    }
    if (!HasName(file.get(), lock_path)) continue;  // Its owner removed it between our open and our lock.
    std::unique_ptr<UnixLock> lock(new UnixLock(lock_path, std::move(file)));
    PS_RETURN_IF_ERROR(CheckPath(flag, path));
    return lock;
  }
  return FailedPrecondition(flag, ": ", lock_path, " is being removed and created again by others");
}

UnixLock::~UnixLock() {
  // Whoever opened it before sees, once it has the lock, that the name is gone.
  if (HasName(file_.get(), lock_path_)) unlink(lock_path_.c_str());
}

}  // namespace ps
