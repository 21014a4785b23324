// One client's conversation with a shard, whatever the transport: a push, the weights that come after it, or a pull.
// Adapters decode what arrives, pass it on, and send what comes back: they are the ShardClients. DataCall is over gRPC,
// LocalLink::Call through shared memory; in process, tests.
//
//   Add* ─▶ Finish ─▶ answer        a push, and with `weights` the version on which the next gradient is computed
//   Pull ─▶ answer                  the weights of a version
//
// One call after the other, from any thread, but for Gone, which may come at any time and from any thread. The client
// is answered once, perhaps before the call returns. The session must live until then, and through each call.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/payload.h"
#include "ps/v1/ps.pb.h"
#include "server/shard/shard.h"

namespace ps {

// How long a request may wait where it names no time of its own, and the most that it may name.
struct WaitLimits {
  std::chrono::nanoseconds wait_default = std::chrono::seconds(30);
  std::chrono::nanoseconds wait_max = std::chrono::minutes(5);
};

class PushPullSession {
 public:
  // The shard outlives it. `peer`: where the client is, for messages; `this_host`: it is on this host.
  PushPullSession(Shard& shard, std::string peer, bool this_host, const WaitLimits& limits = {})
      : shard_(shard), peer_(std::move(peer)), this_host_(this_host), limits_(limits) {}
  ~PushPullSession() { Over(); }
  PushPullSession(const PushPullSession&) = delete;
  PushPullSession& operator=(const PushPullSession&) = delete;

  // Takes some slices of the client's push. Errors are those of Shard::AddSlices; INVALID_ARGUMENT if the header is
  // another push's. `client`, if it is not null, gets slices of the version that the push makes, if the push asks for
  // that.
  absl::Status Add(v1::PushRequest header, std::vector<ReceivedSlice> slices,
                   std::shared_ptr<ShardClient> client = nullptr);
  // The client has said all of its push. It is answered INVALID_ARGUMENT if that was nothing. Without `weights` it gets
  // none, nor does a client whose push was FENCED.
  void Finish(bool weights, std::shared_ptr<ShardClient> client);

  void Pull(const v1::PullRequest& request, std::shared_ptr<ShardClient> client);
  // The client is answered with state.
  void PullState(const v1::PullStateRequest& request, std::shared_ptr<ShardClient> client);
  // The pull of weights that are to be hashed (Shard::HashSlices).
  void PullToHash(const v1::HashSlicesRequest& request, std::shared_ptr<ShardClient> client);

  // The client is gone: what waits is answered CANCELLED. A push whose slices are all here still counts.
  void Gone();
  // The call has ended: it gets no more slices. Nothing else is called any more.
  void Over();

 private:
  void Await(const ShardRequest& request, bool push_ended, std::shared_ptr<ShardClient> client);
  std::chrono::nanoseconds WaitTime(uint32_t wait_ms) const;

  Shard& shard_;
  const std::string peer_;
  const bool this_host_;
  const WaitLimits limits_;
  bool opened_ = false;
  std::optional<v1::PushRequest> push_;  // The newest message's header.
  std::atomic<bool> gone_ = false;
};

// An answer as it is sent, but for the slices.
v1::PullReply HeaderOf(const ShardAnswer& answer);

}  // namespace ps
