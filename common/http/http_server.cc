#include "common/http/http_server.h"

#include <microhttpd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>
#include <string_view>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/http/host_check.h"
#include "common/http/http_listen.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr size_t kMaxRequestBytes = 8 << 10;
// A request and the headers of its answer: libmicrohttpd has both in one piece of memory, and refuses what does not
// fit.
constexpr size_t kConnectionBytes = 16 << 10;
constexpr size_t kMaxTasks = 64;
constexpr int kMaxAcceptsAtOnce = 64;
constexpr size_t kMaxShownHostBytes = 80;
constexpr std::chrono::milliseconds kAcceptAgain(100);  // Where the process has no descriptor left.

// What every answer says to browsers: scripts, styles and data come from this server only, nothing of it is shown
// inside other pages, and nobody is told where a visitor comes from.
constexpr std::pair<const char*, const char*> kSecurityHeaders[] = {
    {"Content-Security-Policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
     "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
    {"X-Content-Type-Options", "nosniff"},
    {"Referrer-Policy", "no-referrer"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
};

// Those that are shut down are closed soon after.
size_t MostSockets(const HttpServerOptions& options) { return 2 * options.max_connections; }

}  // namespace

// One connection, as this side knows it.
struct HttpConnection {
  int socket = -1;
  uint64_t waits_since = 0;  // A number that grows with each connection and each answer.
  bool answering = false;    // A whole request is here, and its answer is not sent yet.
  bool evicted = false;      // It is shut down, and libmicrohttpd will close it.
};

struct HttpServer::Daemon {
  explicit Daemon(const HttpServerOptions& server_options) : options(server_options) {}
  ~Daemon() {
    if (mhd != nullptr) MHD_stop_daemon(mhd);
  }
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // Those that are not shut down.
  size_t open() const {
    return static_cast<size_t>(std::count_if(connections.begin(), connections.end(),
                                             [](const HttpConnection& each) { return !each.evicted; }));
  }
  // Takes the socket over.
  void Add(FileDescriptor socket, const sockaddr* address, socklen_t bytes);
  // Shuts down the connection that has waited for its next request for longest. Returns whether there was one.
  bool EvictIdle();
  MHD_Result Answer(MHD_Connection* connection, const HttpResponse& response);
  // What is wrong with the request as such, before its path is looked at.
  std::optional<HttpResponse> Refusal(MHD_Connection* connection, std::string_view method, std::string_view version);

  const HttpServerOptions& options;
  MHD_Daemon* mhd = nullptr;
  int epoll = -1;  // Ready when libmicrohttpd has something to do.
  std::list<HttpConnection> connections;
  uint64_t last_number = 0;
};

namespace {

HttpConnection* ConnectionOf(MHD_Connection* connection) {
  const MHD_ConnectionInfo* const info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  return info == nullptr ? nullptr : static_cast<HttpConnection*>(info->socket_context);
}

void OnConnection(void* self, MHD_Connection* connection, void** context, MHD_ConnectionNotificationCode code) {
  auto& daemon = *static_cast<HttpServer::Daemon*>(self);
  if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
    daemon.connections.remove_if([&](const HttpConnection& each) { return &each == *context; });
    *context = nullptr;
    return;
  }
  const MHD_ConnectionInfo* const info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  daemon.connections.push_back(
      {.socket = info == nullptr ? -1 : info->connect_fd, .waits_since = ++daemon.last_number});
  *context = &daemon.connections.back();
}

void OnRequestCompleted(void* self, MHD_Connection* connection, void** /*request*/,
                        MHD_RequestTerminationCode /*code*/) {
  HttpConnection* const known = ConnectionOf(connection);
  if (known == nullptr) return;
  known->answering = false;
  known->waits_since = ++static_cast<HttpServer::Daemon*>(self)->last_number;
}

std::string HeaderOf(MHD_Connection* connection, const char* name) {
  const char* const value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
  return value == nullptr ? "" : value;
}

// "gzip" as one of the codings that a client takes, unless it says ";q=0" (RFC 9110, section 12.5.3).
bool TakesGzip(std::string_view accepted) {
  const size_t at = accepted.find("gzip");
  if (at == std::string_view::npos) return false;
  const std::string_view rest = accepted.substr(at + 4, accepted.find(',', at) - at - 4);
  const size_t q = rest.find("q=0");
  return q == std::string_view::npos || rest.find_first_of("123456789", q + 3) != std::string_view::npos;
}

HttpRequest RequestOf(MHD_Connection* connection, const char* path) {
  HttpRequest request{.path = path,
                      .etag = HeaderOf(connection, "If-None-Match"),
                      .takes_gzip = TakesGzip(HeaderOf(connection, "Accept-Encoding"))};
  MHD_get_connection_values(
      connection, MHD_GET_ARGUMENT_KIND,
      [](void* query, MHD_ValueKind /*kind*/, const char* key, const char* value) {
        (*static_cast<std::map<std::string, std::string>*>(query))[key] = value == nullptr ? "" : value;
        return MHD_YES;
      },
      &request.query);
  return request;
}

char first_call_of_request = 0;  // Only its address is used: libmicrohttpd's first call of a request has null.

// libmicrohttpd calls this with a request's headers, again for its body, and once more when all of it is here. What is
// answered at the first call ends the connection, since the body is not read.
MHD_Result OnRequest(void* self, MHD_Connection* connection, const char* url, const char* method, const char* version,
                     const char* /*body*/, size_t* body_bytes, void** request) {
  auto& daemon = *static_cast<HttpServer::Daemon*>(self);
  if (*request == nullptr) {
    *request = &first_call_of_request;
    if (HttpConnection* const known = ConnectionOf(connection); known != nullptr) known->answering = true;
    const std::optional<HttpResponse> refusal = daemon.Refusal(connection, method, version);
    return refusal.has_value() ? daemon.Answer(connection, *refusal) : MHD_YES;
  }
  if (*body_bytes > 0) {  // There is none, as Refusal has looked.
    *body_bytes = 0;
    return MHD_YES;
  }
  const HttpRequest asked = RequestOf(connection, url);
  HttpResponse response = daemon.options.handler(asked);
  if (response.status == 200 && !response.etag.empty() && absl::StrContains(asked.etag, response.etag)) {
    response.status = 304;
    response.body = nullptr;
    response.gzipped = false;
  }
  return daemon.Answer(connection, response);
}

}  // namespace

std::optional<HttpResponse> HttpServer::Daemon::Refusal(MHD_Connection* connection, std::string_view method,
                                                        std::string_view version) {
  if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
    HttpResponse response = TextResponse(405, "only GET and HEAD are answered here; ps_ctl changes a job");
    response.headers.emplace_back("Allow", "GET, HEAD");
    return response;
  }
  const MHD_ConnectionInfo* const info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
  if (info != nullptr && info->header_size > kMaxRequestBytes) {
    return TextResponse(431, absl::StrCat("a request has ", kMaxRequestBytes, " bytes at most"));
  }
  const std::string length = HeaderOf(connection, "Content-Length");
  if (!HeaderOf(connection, "Transfer-Encoding").empty() || (!length.empty() && length != "0")) {
    return TextResponse(413, "requests have no body here");
  }
  int hosts = 0;
  MHD_get_connection_values(
      connection, MHD_HEADER_KIND,
      [](void* count, MHD_ValueKind /*kind*/, const char* key, const char* /*value*/) {
        if (absl::EqualsIgnoreCase(key, "Host")) ++*static_cast<int*>(count);
        return MHD_YES;
      },
      &hosts);
  if (hosts == 0 && version == MHD_HTTP_VERSION_1_0) return std::nullopt;  // No browser: those all name the host.
  if (hosts != 1) return TextResponse(400, "a request has one Host header");
  const std::string host = HeaderOf(connection, "Host");
  if (IsOwnHost(host, options.host_names)) return std::nullopt;
  return TextResponse(
      421, absl::StrCat(
               "Host: ", Printable(host, kMaxShownHostBytes), ": not a name of this server; use an address, localhost",
               options.host_names.empty() ? "" : absl::StrCat(", or ", absl::StrJoin(options.host_names, ", ")),
               " (--advertise says its name)"));
}

MHD_Result HttpServer::Daemon::Answer(MHD_Connection* connection, const HttpResponse& response) {
  // libmicrohttpd sends the body from where it is, so the response keeps it.
  static const auto kEmpty = std::make_shared<const std::string>();
  auto kept = std::make_unique<std::shared_ptr<const std::string>>(response.body == nullptr ? kEmpty : response.body);
  void* const bytes = const_cast<char*>((*kept)->data());  // It is not written to.
  const size_t size = (*kept)->size();
  MHD_Response* const made = MHD_create_response_from_buffer_with_free_callback_cls(
      size, bytes, [](void* held) { delete static_cast<std::shared_ptr<const std::string>*>(held); }, kept.get());
  if (made == nullptr) return MHD_NO;
  (void)kept.release();
  for (const auto& [name, value] : kSecurityHeaders) MHD_add_response_header(made, name, value);
  if (response.status != 304) MHD_add_response_header(made, "Content-Type", response.type.c_str());
  if (response.gzipped) MHD_add_response_header(made, "Content-Encoding", "gzip");
  if (response.etag.empty()) {
    MHD_add_response_header(made, "Cache-Control", "no-store");
  } else {
    MHD_add_response_header(made, "Cache-Control", "no-cache");
    MHD_add_response_header(made, "ETag", response.etag.c_str());
    MHD_add_response_header(made, "Vary", "Accept-Encoding");
  }
  for (const auto& [name, value] : response.headers) MHD_add_response_header(made, name.c_str(), value.c_str());
  const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(response.status), made);
  MHD_destroy_response(made);
  return queued;
}

bool HttpServer::Daemon::EvictIdle() {
  HttpConnection* oldest = nullptr;
  for (HttpConnection& each : connections) {
    if (each.answering || each.evicted) continue;
    if (oldest == nullptr || each.waits_since < oldest->waits_since) oldest = &each;
  }
  if (oldest == nullptr) return false;
  oldest->evicted = true;
  shutdown(oldest->socket, SHUT_RDWR);  // libmicrohttpd, whose it is, sees its end, and closes it.
  return true;
}

void HttpServer::Daemon::Add(FileDescriptor socket, const sockaddr* address, socklen_t bytes) {
  if (open() >= options.max_connections) MHD_run(mhd);  // It reads the requests that have come, so these do not wait.
  const bool full = open() >= options.max_connections && !EvictIdle();
  if (full || connections.size() >= MostSockets(options)) {
    const std::string text = absl::StrCat(open(), " connections are open, the limit\n");
    const std::string answer =
        absl::StrCat("HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\n",
                     "Content-Length: ", text.size(), "\r\nRetry-After: 1\r\n\r\n", text);
    (void)!send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return;
  }
  // It closes the socket, too, if it does not take it.
  (void)MHD_add_connection(mhd, socket.Release(), address, bytes);
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(HttpServerOptions options) {
  Endpoint endpoint = options.endpoint;
  const std::string flag = absl::StrCat("--", options.flag, "=", endpoint.ToString());
  if (endpoint.is_unix()) return InvalidArgument(flag, ": expected HOST:PORT");
  PS_ASSIGN_OR_RETURN(std::vector<FileDescriptor> sockets, ListenForHttp(flag, endpoint));
  FileDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return Unavailable(flag, ": ", std::strerror(errno));
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(options), std::move(endpoint), std::move(sockets), std::move(wake)));
  Daemon& daemon = *server->daemon_;
  // Without a thread or a socket of its own: this side decides who is taken in.
  daemon.mhd = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET, 0, nullptr, nullptr, &OnRequest, &daemon,
                                MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_CONNECTION_LIMIT,
                                static_cast<unsigned>(MostSockets(server->options_)), MHD_OPTION_CONNECTION_TIMEOUT,
                                server->options_.idle_s, MHD_OPTION_NOTIFY_CONNECTION, &OnConnection, &daemon,
                                MHD_OPTION_NOTIFY_COMPLETED, &OnRequestCompleted, &daemon, MHD_OPTION_END);
  const MHD_DaemonInfo* const info =
      daemon.mhd == nullptr ? nullptr : MHD_get_daemon_info(daemon.mhd, MHD_DAEMON_INFO_EPOLL_FD);
  if (info == nullptr) return Unavailable(flag, ": libmicrohttpd does not start");
  daemon.epoll = info->epoll_fd;
  server->thread_ = std::thread([self = server.get()] {
    pthread_setname_np(pthread_self(), "http");
    self->Run();
  });
  return server;
}

HttpServer::HttpServer(HttpServerOptions options, Endpoint endpoint, std::vector<FileDescriptor> sockets,
                       FileDescriptor wake)
    : options_(std::move(options)),
      endpoint_(std::move(endpoint)),
      sockets_(std::move(sockets)),
      wake_(std::move(wake)),
      daemon_(std::make_unique<Daemon>(options_)) {}

HttpServer::~HttpServer() {
  stopping_ = true;
  Wake();
  if (thread_.joinable()) thread_.join();
}

bool HttpServer::Post(std::function<void()> task) {
  {
    MutexLock lock(mutex_);
    if (tasks_.size() >= kMaxTasks) return false;
    tasks_.push_back(std::move(task));
  }
  Wake();
  return true;
}

void HttpServer::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void HttpServer::RunTasks() {
  std::deque<std::function<void()>> tasks;
  {
    MutexLock lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const std::function<void()>& task : tasks) task();
}

void HttpServer::AcceptFrom(int socket) {
  for (int i = 0; i < kMaxAcceptsAtOnce; ++i) {
    sockaddr_storage address = {};
    socklen_t bytes = sizeof address;
    FileDescriptor taken(accept4(socket, reinterpret_cast<sockaddr*>(&address), &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (taken.valid()) {
      daemon_->Add(std::move(taken), reinterpret_cast<const sockaddr*>(&address), bytes);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      (void)daemon_->EvictIdle();
      accepts_at_ = Now() + kAcceptAgain;
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return;
    }
  }
}

void HttpServer::Run() {
  std::vector<pollfd> polled;
  polled.push_back({.fd = wake_.get(), .events = POLLIN});
  polled.push_back({.fd = daemon_->epoll, .events = POLLIN});
  for (const FileDescriptor& socket : sockets_) polled.push_back({.fd = socket.get(), .events = POLLIN});
  while (!stopping_) {
    MHD_UNSIGNED_LONG_LONG wait_ms = 0;
    int timeout_ms = MHD_get_timeout(daemon_->mhd, &wait_ms) == MHD_YES
                         ? static_cast<int>(std::min<MHD_UNSIGNED_LONG_LONG>(wait_ms, 1000 * options_.idle_s))
                         : -1;
    const TimePoint now = Now();
    const bool accepts = now >= accepts_at_;
    if (!accepts) {
      const auto again_ms = std::chrono::duration_cast<std::chrono::milliseconds>(accepts_at_ - now).count() + 1;
      timeout_ms = timeout_ms < 0 ? static_cast<int>(again_ms) : std::min(timeout_ms, static_cast<int>(again_ms));
    }
    for (size_t i = 2; i < polled.size(); ++i) polled[i].fd = accepts ? sockets_[i - 2].get() : -1;
    (void)poll(polled.data(), polled.size(), timeout_ms);
    if ((polled[0].revents & POLLIN) != 0) {
      uint64_t count = 0;
      (void)!read(wake_.get(), &count, sizeof count);
      RunTasks();
    }
    MHD_run(daemon_->mhd);
    for (size_t i = 2; i < polled.size(); ++i) {
      if (polled[i].fd >= 0 && (polled[i].revents & POLLIN) != 0) AcceptFrom(sockets_[i - 2].get());
    }
  }
}

}  // namespace ps
