// A TCP proxy inside a test: everything passes, until it is told to reset all connections.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "common/sync.h"
#include "tests/catch.h"

namespace ps {

class Proxy {
 public:
  // Forwards what comes to 127.0.0.1:port, its own, to 127.0.0.1:target_port; 0: that is told later.
  explicit Proxy(int target_port = 0)
      : target_port_(target_port), listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    REQUIRE(bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(listen(listener_, 64) == 0);
    REQUIRE(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~Proxy() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    ResetAll();
    for (std::thread& pump : pumps_) pump.join();
    close(listener_);
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  const std::string& address() const { return address_; }
  // Before anybody connects.
  void SetTarget(int port) { target_port_ = port; }

  // Both ends of every connection see a reset. Returns how many there were.
  size_t ResetAll() {
    MutexLock lock(mutex_);
    for (const int end : ends_) {
      const linger hard = {.l_onoff = 1, .l_linger = 0};
      setsockopt(end, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
      // Not closed: the number is the pump's until it has seen the end. connect to AF_UNSPEC resets.
      const sockaddr nowhere = {.sa_family = AF_UNSPEC, .sa_data = {}};
      (void)connect(end, &nowhere, sizeof(nowhere));
    }
    return ends_.size() / 2;
  }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  void Accept() {
    for (int from = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC); from >= 0;
         from = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) {
      const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in target = Loopback(target_port_);
      if (connect(to, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) != 0) {
        close(from);
        close(to);
        continue;
      }
      const int at_once = 1;
      for (const int end : {from, to}) setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof(at_once));
      MutexLock lock(mutex_);
      ends_.push_back(from);
      ends_.push_back(to);
      pumps_.emplace_back([this, from, to] { Pump(from, to); });
    }
  }

  void Pump(int from, int to) {
    pollfd ends[2] = {{.fd = from, .events = POLLIN, .revents = 0}, {.fd = to, .events = POLLIN, .revents = 0}};
    std::vector<char> buffer(1 << 16);
    for (bool open = true; open && poll(ends, 2, -1) > 0;) {
      for (int i = 0; i < 2 && open; ++i) {
        if (ends[i].revents == 0) continue;
        const ssize_t got = recv(ends[i].fd, buffer.data(), buffer.size(), 0);
        open = got > 0;
        for (ssize_t sent = 0; open && sent < got;) {
          const ssize_t now = send(ends[1 - i].fd, buffer.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
          open = now > 0;
          sent += now;
        }
      }
    }
    MutexLock lock(mutex_);
    std::erase_if(ends_, [&](int end) { return end == from || end == to; });
    close(from);
    close(to);
  }

  std::atomic<int> target_port_;
  const int listener_;
  std::string address_;
  Mutex mutex_;
  std::vector<int> ends_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> pumps_;  // The acceptor's until it has ended.
  std::thread acceptor_;
};

}  // namespace ps
