#include "common/endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <string_view>

#include <grpc/impl/codegen/grpc_types.h>
#include <grpc/support/log.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/version_info.h>
#include <spdlog/spdlog.h>
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/files.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {

#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65
namespace {

constexpr size_t kMaxLineBytes = 1024;

void Log(gpr_log_func_args* args) {
  const std::string_view text = args->message;
  // The process ends here, and a log that is written by a thread of its own with it.
  if (text.rfind("assertion failed", 0) == 0) {
    (void)std::fprintf(stderr, "gRPC: %s:%d: %s\n", args->file, args->line, args->message);
    return;
  }
  const std::string_view file = args->file;
  if (file.substr(file.rfind('/') + 1) == "chttp2_server.cc" && args->severity == GPR_LOG_SEVERITY_ERROR) return;
  // Less than errors come only if GRPC_VERBOSITY asks for them.
  const auto level = args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::info;
  spdlog::log(level, "gRPC: {}", Printable(text, kMaxLineBytes));
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Log); }
#else
void RouteGrpcLog() {}
#endif

namespace {

constexpr int kClientWindowBytes = 64 << 20;  // The counterpart of kServerWindowBytes, for what the server sends.
constexpr int kReadChunkBytes = 2 << 20;
// This limits what a server sends its clients and shards: more than its reports and their requests, for it tells the
// layout, and a shard that is started again the checkpoint's manifest, which has some hundred bytes a tensor.
constexpr int kMaxToldBytes = 256 << 20;
constexpr int kMaxStreams = 128;  // Calls at once on a connection; more wait at the client.
constexpr int kKeepaliveMs = 10000;
constexpr int kKeepaliveTimeoutMs = 10000;
constexpr int kReconnectMs = 200;        // Between two attempts: a server that was started again is found at once.
constexpr int kHandshakeMs = 10000;      // A caller begins in this time: who only connects keeps no place for longer.
constexpr int kConnectAttemptMs = 5000;  // A connection is there by then; a busy server takes its time.

// What client and server have in common, but for the windows; `set` takes (name, value). `long_links`: gRPC measures
// what a link carries in a round trip (its BDP probe), and lets windows grow with it.
template <typename Set>
void SetTransportArguments(int window_bytes, bool long_links, Set set) {
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, window_bytes);
  set(GRPC_ARG_HTTP2_BDP_PROBE, long_links ? 1 : 0);
  set(GRPC_ARG_TCP_READ_CHUNK_SIZE, kReadChunkBytes);
  set(GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, kReadChunkBytes / 4);
  set(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadChunkBytes);
  set(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  set(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

// gRPC's threads for callbacks end with the last channel or server that uses them, and whoever lets that one go waits
// for them. gRPC lets go of a call's channel in such a thread: if it is the last, the thread waits for itself, and goes
// on with a queue that is gone (CallbackAlternativeCQ, as of gRPC 1.51). So a channel that leads nowhere keeps them for
// as long as the process lives.
void KeepCallbackThreads() {
  struct Call {
    grpc::ClientContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer reply;
  };
  // Volatile, so that the compiler keeps it, and leak checkers find through it what is kept.
  [[maybe_unused]] static const auto* const volatile kept = [] {
    auto* made = new grpc::GenericStub(grpc::CreateChannel("", nullptr));
    const auto call = std::make_shared<Call>();
    const grpc::Slice nothing;
    call->request = grpc::ByteBuffer(&nothing, 1);
    // A channel uses the threads from its first call on. This one has no credentials: its calls fail at once.
    made->UnaryCall(&call->context, "/ps.v1.Nobody/Nothing", {}, &call->request, &call->reply,
                    [call](const grpc::Status&) {});
    return made;
  }();
}

// Only own addresses can be bound to.
bool CanBind(int family, const sockaddr* address, socklen_t size) {
  const FileDescriptor socket(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return socket.valid() && ::bind(socket.get(), address, size) == 0;
}

}  // namespace

std::string Endpoint::ToString() const {
  if (is_unix()) return absl::StrCat("unix:", unix_path);
  return host.find(':') == std::string::npos ? absl::StrCat(host, ":", port) : absl::StrCat("[", host, "]:", port);
}

absl::StatusOr<Endpoint> ParseEndpoint(const std::string& flag, const std::string& text) {
  const auto wrong = [&] { return InvalidArgument("--", flag, "=", text, ": expected HOST:PORT or unix:PATH"); };
  Endpoint endpoint;
  if (text.rfind("unix:", 0) == 0) {
    endpoint.unix_path = text.substr(5);
    if (endpoint.unix_path.empty()) return wrong();
    return endpoint;
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return wrong();
  endpoint.host = text.substr(0, colon);
  if (endpoint.host.size() > 2 && endpoint.host.front() == '[' && endpoint.host.back() == ']') {
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  } else if (endpoint.host.find(':') != std::string::npos) {
    return wrong();
  }
  if (!absl::SimpleAtoi(text.substr(colon + 1), &endpoint.port) || endpoint.port < 0 || endpoint.port > 65535) {
    return wrong();
  }
  return endpoint;
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const std::shared_ptr<grpc::ChannelCredentials>& credentials, int lane,
                                           bool long_links) {
  KeepCallbackThreads();
  grpc::ChannelArguments arguments;
  SetTransportArguments(kClientWindowBytes, long_links && !IsThisHost(address),
                        [&](const char* name, int value) { arguments.SetInt(name, value); });
  arguments.SetInt(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, kMaxToldBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectAttemptMs);  // Named for the pause, but is not it.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt("ps.lane", lane);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

int ServerSilenceMs(std::chrono::nanoseconds silence) {
  const auto silence_ms = std::chrono::duration_cast<std::chrono::milliseconds>(silence).count();
  return static_cast<int>(std::clamp<int64_t>(silence_ms, kKeepaliveTimeoutMs, std::numeric_limits<int>::max()));
}

void SetServerArguments(grpc::ServerBuilder& builder, std::chrono::nanoseconds silence, bool long_links) {
  builder.AddChannelArgument(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  SetTransportArguments(kServerWindowBytes, long_links,
                        [&](const char* name, int value) { builder.AddChannelArgument(name, value); });
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, ServerSilenceMs(silence));
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Pings are not punished: for each one past the limit gRPC 1.51 queues a GOAWAY, and a caller that does not read had
  // it hold gigabytes so. Without, it reads no more from a caller that leaves 10,000 answers unread.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
}

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
