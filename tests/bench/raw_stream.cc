#include "tests/bench/raw_stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"

namespace ps {
namespace {

struct SocketPair {
  int sender = -1;
  int receiver = -1;
  ~SocketPair() {
    if (sender >= 0) close(sender);
    if (receiver >= 0) close(receiver);
  }
};

absl::Status Failed(const std::string& call) {
  return absl::InternalError(absl::StrCat("raw stream: ", call, ": ", std::strerror(errno)));
}

absl::Status ConnectTcp(SocketPair* pair) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0) return Failed("socket");
  const absl::Cleanup close_listener = [listener] { close(listener); };
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Failed("listen");
  }
  pair->sender = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(pair->sender, reinterpret_cast<sockaddr*>(&address), size) != 0) return Failed("connect");
  pair->receiver = accept(listener, nullptr, nullptr);
  if (pair->receiver < 0) return Failed("accept");
  const int on = 1;
  for (int end : {pair->sender, pair->receiver}) setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return absl::OkStatus();
}

bool SendAll(int socket, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = send(socket, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

bool ReceiveAll(int socket, char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t received = recv(socket, data, bytes, 0);
    if (received <= 0) return false;
    data += received;
    bytes -= static_cast<size_t>(received);
  }
  return true;
}

}  // namespace

absl::StatusOr<std::vector<double>> MeasureRawStream(bool tcp, size_t bytes, int repeats) {
  SocketPair pair;
  if (tcp) {
    if (absl::Status status = ConnectTcp(&pair); !status.ok()) return status;
  } else {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return Failed("socketpair");
    pair.sender = ends[0];
    pair.receiver = ends[1];
  }
  std::thread receiver([&] {
    std::vector<char> buffer(bytes);
    const char answer = 1;
    for (int i = 0; i <= repeats; ++i) {
      if (!ReceiveAll(pair.receiver, buffer.data(), bytes) || !SendAll(pair.receiver, &answer, 1)) break;
    }
    shutdown(pair.receiver, SHUT_RDWR);
  });
  const std::vector<char> message(bytes, 1);
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    const TimePoint began = Now();
    char answer = 0;
    if (!SendAll(pair.sender, message.data(), bytes) || !ReceiveAll(pair.sender, &answer, 1)) break;
    if (i > 0) seconds.push_back(Seconds(Now() - began));
  }
  shutdown(pair.sender, SHUT_RDWR);
  receiver.join();
  if (seconds.size() != static_cast<size_t>(repeats)) return Failed("send or recv");
  return seconds;
}

}  // namespace ps
