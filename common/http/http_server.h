// A small server of HTTP for people and for what scrapes metrics: GET and HEAD only, from memory, on one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/endpoint.h"
#include "common/files.h"
#include "common/http/http_message.h"
#include "common/sync.h"

namespace ps {

struct HttpServerOptions {
  std::string flag = "http_listen";     // For messages.
  Endpoint endpoint;                    // HOST:PORT; port 0 picks one.
  std::vector<std::string> host_names;  // By which clients may ask, beside addresses and localhost (IsOwnHost).
  // What becomes of a request; called on the server's thread, so it should take milliseconds at most.
  std::function<HttpResponse(const HttpRequest&)> handler;
  size_t max_connections = 64;
  unsigned idle_s = 10;  // A connection over which nothing goes for so long is closed.
};

// It takes in `max_connections`. When they are there, and one more comes, the one that has waited for its next request
// for longest gives way; so clients that connect and say nothing keep nobody out. Where all of them are being answered,
// the newcomer is told 503. A request has 8 KiB at most (431, 414), and no body (413).
//
// Thread-safe.
class HttpServer {
 public:
  // Listens, and answers from now on. UNAVAILABLE, naming the flag, if it cannot listen.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(HttpServerOptions options);
  // Closes all connections; requests that have no answer yet get none.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // What it listens on, with the real port.
  const Endpoint& endpoint() const { return endpoint_; }

  // Runs the task on the server's thread, between requests, in order: so what the handler uses needs no lock. False:
  // too many wait already, and this one is dropped. Never waits.
  bool Post(std::function<void()> task);

  struct Daemon;  // libmicrohttpd's side.

 private:
  HttpServer(HttpServerOptions options, Endpoint endpoint, std::vector<FileDescriptor> sockets, FileDescriptor wake);
  void Run();
  void RunTasks();
  void AcceptFrom(int socket);
  void Wake();

  const HttpServerOptions options_;
  const Endpoint endpoint_;
  const std::vector<FileDescriptor> sockets_;
  const FileDescriptor wake_;  // An eventfd.
  std::unique_ptr<Daemon> daemon_;
  std::atomic<bool> stopping_ = false;
  TimePoint accepts_at_;  // The thread's: it takes nobody in before.
  Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ps
