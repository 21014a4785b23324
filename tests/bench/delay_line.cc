#include "tests/bench/delay_line.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/files.h"
#include "common/sync.h"

namespace ps {
namespace {

constexpr size_t kReadBytes = 256 << 10;
constexpr size_t kOnTheWayBytes = 256 << 20;

absl::StatusOr<sockaddr_in> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  uint32_t port = 0;
  if (colon == std::string::npos || inet_pton(AF_INET, text.substr(0, colon).c_str(), &address.sin_addr) != 1 ||
      !absl::SimpleAtoi(text.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(text, ": expected an IPv4 address and a port"));
  }
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

// A connection's two ends, which live as long as one of its directions does.
struct Connection {
  FileDescriptor client;
  FileDescriptor server;
};

// One direction of a connection, on two threads.
class Direction {
 public:
  Direction(std::shared_ptr<Connection> connection, bool up, std::chrono::nanoseconds delay)
      : connection_(std::move(connection)),
        from_(up ? connection_->client.get() : connection_->server.get()),
        to_(up ? connection_->server.get() : connection_->client.get()),
        delay_(delay) {}

  // Until the sender ends.
  void Receive() {
    std::vector<char> read_bytes(kReadBytes);
    for (bool more = true; more;) {
      const ssize_t got = read(from_, read_bytes.data(), read_bytes.size());
      more = got > 0;
      Part part = {.bytes = {read_bytes.begin(), read_bytes.begin() + std::max<ssize_t>(got, 0)},
                   .due = Now() + delay_};
      const MutexLock lock(mutex_);
      while (on_the_way_ > kOnTheWayBytes) changed_.Wait(mutex_);
      on_the_way_ += part.bytes.size();
      parts_.push_back(std::move(part));
      changed_.NotifyAll();
    }
  }

  // Each part when it is due; an empty one is the end. What can no longer be delivered is dropped.
  void Deliver() {
    for (bool open = true;;) {
      const Part part = Next();
      std::this_thread::sleep_until(part.due);
      if (part.bytes.empty()) break;
      for (size_t sent = 0; open && sent < part.bytes.size();) {
        const ssize_t wrote = send(to_, part.bytes.data() + sent, part.bytes.size() - sent, MSG_NOSIGNAL);
        if (wrote <= 0) open = false;
        if (wrote > 0) sent += static_cast<size_t>(wrote);
      }
      if (!open) shutdown(from_, SHUT_RD);
    }
    shutdown(to_, SHUT_WR);
  }

 private:
  struct Part {
    std::vector<char> bytes;
    TimePoint due;
  };

  Part Next() {
    const MutexLock lock(mutex_);
    while (parts_.empty()) changed_.Wait(mutex_);
    Part part = std::move(parts_.front());
    parts_.pop_front();
    on_the_way_ -= part.bytes.size();
    changed_.NotifyAll();
    return part;
  }

  const std::shared_ptr<Connection> connection_;
  const int from_;
  const int to_;
  const std::chrono::nanoseconds delay_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Part> parts_ ABSL_GUARDED_BY(mutex_);
  size_t on_the_way_ ABSL_GUARDED_BY(mutex_) = 0;
};

void SendAtOnce(int socket) {
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

void Serve(FileDescriptor client, const sockaddr_in& server, std::chrono::nanoseconds delay) {
  auto connection = std::make_shared<Connection>();
  connection->client = std::move(client);
  connection->server = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(connection->server.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server)) != 0) return;
  SendAtOnce(connection->client.get());
  SendAtOnce(connection->server.get());
  for (const bool up : {true, false}) {
    auto direction = std::make_shared<Direction>(connection, up, delay);
    std::thread([direction] { direction->Receive(); }).detach();  // Until the connection or the process ends.
    std::thread([direction] { direction->Deliver(); }).detach();
  }
}

}  // namespace

absl::Status RunDelayLine(const std::string& listen, const std::string& server, std::chrono::nanoseconds delay) {
  const absl::StatusOr<sockaddr_in> own = ParseAddress(listen);
  if (!own.ok()) return own.status();
  const absl::StatusOr<sockaddr_in> target = ParseAddress(server);
  if (!target.ok()) return target.status();
  const FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&*own), sizeof(*own)) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat(listen, ": cannot listen"));
  }
  std::cout << "listening" << std::endl;
  for (;;) {
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    FileDescriptor client(accept4(listener.get(), reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC));
    if (!client.valid() && (errno == ECONNABORTED || errno == EINTR)) continue;
    if (!client.valid()) return absl::UnavailableError(absl::StrCat(listen, ": cannot accept: ", strerror(errno)));
    const bool same_host = peer.sin_addr.s_addr == own->sin_addr.s_addr;
    Serve(std::move(client), *target, same_host ? std::chrono::nanoseconds(0) : delay);
  }
}

}  // namespace ps
