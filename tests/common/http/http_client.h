// A client of HTTP for tests, down to the bytes that it sends.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/files.h"

namespace ps {

struct HttpReply {
  int status = 0;  // 0: the server closed the connection, or did not answer in time.
  std::string head;
  std::string body;

  // The value of the header; empty: there is none.
  std::string Header(std::string_view name) const {
    const std::string begin = absl::StrCat("\r\n", std::string(name), ": ");
    const size_t at = head.find(begin);
    if (at == std::string::npos) return "";
    return head.substr(at + begin.size(), head.find("\r\n", at + 2) - at - begin.size());
  }
};

// One connection; requests over it come one after the other. Every wait ends after 20 s.
class HttpClient {
 public:
  explicit HttpClient(const Endpoint& server) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(server.port))};
    inet_pton(AF_INET, server.host.c_str(), &address.sin_addr);
    connected_ = connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }

  bool connected() const { return connected_; }
  bool Send(const std::string& bytes) {
    return send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // The next answer. `head_only`: of a HEAD request, so without a body, whatever it says.
  HttpReply Receive(bool head_only = false) {
    while (received_.find("\r\n\r\n") == std::string::npos) {
      if (!ReceiveMore()) return {};
    }
    HttpReply reply;
    const size_t end = received_.find("\r\n\r\n");
    reply.head = received_.substr(0, end + 2);
    reply.status = std::atoi(reply.head.substr(9, 3).c_str());
    received_.erase(0, end + 4);
    const auto bytes = static_cast<size_t>(std::atoll(reply.Header("Content-Length").c_str()));
    if (head_only) return reply;
    while (received_.size() < bytes) {
      if (!ReceiveMore()) break;
    }
    reply.body = received_.substr(0, bytes);
    received_.erase(0, bytes);
    return reply;
  }
  HttpReply Get(const std::string& path, const std::string& headers = "") {
    if (!Send(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n", headers, "\r\n"))) return {};
    return Receive();
  }
  // Whether the server closes the connection in time. What it sends before is dropped.
  bool Closes() {
    while (ReceiveMore()) continue;
    return closed_;
  }
  // Whether the server has not closed it by now.
  bool open() {
    char byte = 0;
    return recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0;
  }

 private:
  bool ReceiveMore() {
    pollfd polled = {.fd = socket_.get(), .events = POLLIN};
    if (poll(&polled, 1, 20000) != 1) return false;
    char bytes[16384];
    const ssize_t count = recv(socket_.get(), bytes, sizeof bytes, 0);
    closed_ = count <= 0;
    if (count > 0) received_.append(bytes, static_cast<size_t>(count));
    return count > 0;
  }

  FileDescriptor socket_;
  bool connected_ = false;
  bool closed_ = false;
  std::string received_;
};

}  // namespace ps
