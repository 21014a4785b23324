#include "common/this_host.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/file_descriptor.h"

namespace ps {
namespace {

// Only own addresses can be bound to.
bool CanBind(int family, const sockaddr* address, socklen_t size) {
  const FileDescriptor socket(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return socket.valid() && ::bind(socket.get(), address, size) == 0;
}

}  // namespace

bool IsThisHost(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return true;
  std::string host = absl::StrReplaceAll(address, {{"%5B", "["}, {"%5D", "]"}});
  host = std::string(absl::StripPrefix(absl::StripPrefix(host, "ipv4:"), "ipv6:"));
  host = host.substr(0, host.rfind(':'));
  if (host == "localhost") return true;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  sockaddr_in v4 = {.sin_family = AF_INET};
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    return CanBind(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  }
  sockaddr_in6 v6 = {.sin6_family = AF_INET6};
  if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return false;
  // A socket for both gives IPv4 peers so.
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    std::copy_n(&v6.sin6_addr.s6_addr[12], 4, reinterpret_cast<uint8_t*>(&v4.sin_addr));
    return CanBind(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  }
  return CanBind(AF_INET6, reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
}

}  // namespace ps
