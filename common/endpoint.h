// Addresses, the gRPC channels and arguments that every part of the system uses, and where gRPC's own log goes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/server_builder.h>
#include "absl/status/statusor.h"

namespace ps {

// Bytes of a message at most: gRPC's default, stated.
inline constexpr int kMaxMessageBytes = 4 << 20;

// Bytes of slices that a message of ours has at most, unless one slice has more (tests/bench/TRIALS.md).
inline constexpr int64_t kMostMessageSliceBytes = 1 << 20;

// Bytes that a client may send on each call before the server has read any (the HTTP/2 window): two of the largest
// messages that ours send. Any caller can fill this much of the server's memory, and a larger window makes nothing
// faster on links whose delay is short (tests/bench/TRIALS.md). With long links gRPC lets it grow to twice what it has
// seen a connection bring in a round trip, up to the second value.
inline constexpr int kServerWindowBytes = 2 << 20;
inline constexpr int kMostLongLinkWindowBytes = 32 << 20;

// HOST:PORT (an IPv6 address in brackets) or unix:PATH.
struct Endpoint {
  std::string host;  // Empty for a Unix socket.
  int port = 0;
  std::string unix_path;

  bool is_unix() const { return !unix_path.empty(); }
  // Reachable from this machine only.
  bool is_local() const { return is_unix() || host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0; }
  std::string ToString() const;
};

// INVALID_ARGUMENT, naming `flag`, if the text is no address.
absl::StatusOr<Endpoint> ParseEndpoint(const std::string& flag, const std::string& text);

// A channel to a server of this system: no transparent retries (the client decides, because it knows what is safe), no
// HTTP proxy, large HTTP/2 frames and windows. Channels with different `lane` numbers have connections of their own.
// `long_links`: windows grow with a link's delay; otherwise a connection has one message on its way in a round trip.
// With the first channel gRPC starts its threads for callbacks; they stay until the process ends.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const std::shared_ptr<grpc::ChannelCredentials>& credentials, int lane,
                                           bool long_links = false);

// The same on the server's side; a port that is in use is noticed. A peer that is silent for about `silence` is cut
// off: at least as long as whoever falls silent has by other rules, as a worker has its lease. A caller that connects
// and does not begin to speak HTTP/2 is cut off after 10 s.
int ServerSilenceMs(std::chrono::nanoseconds silence);
void SetServerArguments(grpc::ServerBuilder& builder, std::chrono::nanoseconds silence, bool long_links = false);

// From now on what gRPC logs comes as lines of this program's log (InitLogging), its errors as warnings. The one that
// an address cannot be listened on is left out: it spans half a screen, and whoever starts the server says it in a
// line. Does nothing from gRPC 1.65 on, which logs through Abseil. For programs: it holds for the whole process.
void RouteGrpcLog();

// Whether an address is one of this host's own: that of a peer as gRPC names it ("ipv4:10.0.0.1:5000",
// "ipv6:[::1]:5000", "unix:…"), or HOST:PORT with a number or localhost for HOST. False for other names, which nobody
// looks up here. An address of this process's network namespace is its own; containers have namespaces of theirs. Where
// the kernel lets any address be bound to (net.ipv4.ip_nonlocal_bind), all are this host's. Makes a system call or
// three, and never waits.
bool IsThisHost(const std::string& address);

}  // namespace ps
