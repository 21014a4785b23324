// The data calls of service Shard over gRPC (Init, Push, Pull, PushPull, PullState, HashSlices): a thin adapter on
// PushPullSession. It reads raw messages, so that payloads are neither copied nor parsed by generated code and a
// request's size is looked at before it is parsed, and it writes the slices of a pinned version by reference.
#pragma once

#include <cstddef>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/shard/shard.h"
#include "server/transport/call_watch.h"

namespace ps {

class GrpcDataService {
 public:
  // Takes its calls from the router. All outlive the gRPC server, whose windows grow with `long_links` (endpoint.h).
  GrpcDataService(Shard& shard, CallRouter& router, bool long_links);

  // Cancels calls that do not move on.
  void Tick(TimePoint now) {
    router_.Tick(now, [this] { return shard_.MemberIncarnations(); });
  }

  // The shard at a glance, with the calls that are open.
  v1::ShardStatusReply Status(TimePoint now) const;
  // Adds to the shard's status what only its transport knows: open calls, bytes by link, refused calls.
  void Describe(v1::ShardStatusReply& status) const;

 private:
  static constexpr size_t kMostPeers = 4096;  // That are remembered.

  // Whether the caller with this address and port, which a connection keeps, is on this host.
  bool IsHere(const std::string& peer);

  Shard& shard_;
  CallRouter& router_;
  const uint64_t window_bytes_;  // A call has received so many at most that it has not read.
  Mutex peers_mutex_;
  absl::flat_hash_map<std::string, bool> peers_ ABSL_GUARDED_BY(peers_mutex_);
};

}  // namespace ps
