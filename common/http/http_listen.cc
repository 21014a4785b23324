#include "common/http/http_listen.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kHttpBacklog = 256;

absl::Status CannotListen(const std::string& flag, int error) {
  if (error == EADDRINUSE) return Unavailable(flag, ": the port is in use; port 0 picks a free one");
  if (error == EADDRNOTAVAIL) return Unavailable(flag, ": the address does not belong to this machine");
  if (error == EACCES) return Unavailable(flag, ": ports below 1024 need privileges that this process has not");
  return Unavailable(flag, ": ", std::strerror(error));
}

absl::StatusOr<FileDescriptor> ListenForHttpAt(const std::string& flag, const addrinfo& address) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return CannotListen(flag, errno);
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Each address has a socket of its own.
  if (address.ai_family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (bind(socket.get(), address.ai_addr, address.ai_addrlen) != 0) return CannotListen(flag, errno);
  if (listen(socket.get(), kHttpBacklog) != 0) return CannotListen(flag, errno);
  return socket;
}

// The port is at the same place in the addresses of both families.
void SetHttpPort(addrinfo& address, int port) {
  const auto value = htons(static_cast<uint16_t>(port));
  if (address.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port = value;
  } else {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = value;
  }
}

int HttpPortOf(int socket) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

absl::StatusOr<std::vector<FileDescriptor>> ListenForHttp(const std::string& flag, Endpoint& endpoint) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(endpoint.host.c_str(), nullptr, &hints, &found); error != 0) {
    return Unavailable(flag, ": ", gai_strerror(error));
  }
  const absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  std::vector<FileDescriptor> sockets;
  absl::Status why;
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    SetHttpPort(*each, endpoint.port);
    absl::StatusOr<FileDescriptor> socket = ListenForHttpAt(flag, *each);
    if (!socket.ok()) {
      why.Update(socket.status());
      continue;
    }
    if (endpoint.port == 0) endpoint.port = HttpPortOf(socket->get());  // The others have the same.
    sockets.push_back(*std::move(socket));
  }
  if (!sockets.empty()) return sockets;
  if (!why.ok()) return why;
  return Unavailable(flag, ": the name has no address");
}

}  // namespace ps
