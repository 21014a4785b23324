// One client's conversation with a shard, whatever the transport: a push, the weights that come after it, a pull, or
// hashes. Adapters decode what arrives, pass it on, and send what comes back: DataCall over gRPC, LocalLink through
// shared memory; in process, tests.
//
//   Add* ─▶ Finish ─▶ callback        a push, and with `weights` the version on which the next gradient is computed
//   Pull ─▶ callback                  the weights of a version
//   Hash ─▶ callback                  the hashes of its slices
//
// One call after the other, from any thread, but for Gone, which may come at any time and from any thread. The callback
// is made once, from any thread, perhaps before the call returns. The session must live until then, and through each
// call.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  // What a push or a pull gets: the reply without its slices, and the weights that these are of. Without weights the
  // call only pushed, or its push was FENCED.
  struct Reply {
    v1::PullReply header;
    std::optional<VersionPin> weights;
  };
  using Callback = std::function<void(absl::StatusOr<Reply>)>;
  using HashCallback = std::function<void(absl::StatusOr<v1::HashSlicesReply>)>;

  // The shard outlives it. `peer`: where the client is, for messages; `this_host`: it is on this host.
  PushPullSession(Shard& shard, std::string peer, bool this_host, const WaitLimits& limits)
      : shard_(shard), peer_(std::move(peer)), this_host_(this_host), limits_(limits) {}
  ~PushPullSession() { Over(); }
  PushPullSession(const PushPullSession&) = delete;
  PushPullSession& operator=(const PushPullSession&) = delete;

  // Takes some slices of the client's push. Errors are those of Shard::AddSlices; INVALID_ARGUMENT if the header is
  // another push's.
  absl::Status Add(v1::PushRequest header, std::vector<ReceivedSlice> slices);
  // Gives a callback that gets slices of the version that the push makes, as they are built, if the push asks for that;
  // it is not called after Finish's callback. An adapter that can send such slices gives it before the first Add.
  void Stream(BuildStreams::Callback callback) { stream_ = std::move(callback); }
  // The client has said all of its push. INVALID_ARGUMENT, by the callback, if that was nothing.
  void Finish(bool weights, Callback callback);

  void Pull(const v1::PullRequest& request, Callback callback);
  void Hash(const v1::HashSlicesRequest& request, HashCallback callback);

  // The client is gone: what waits is answered CANCELLED. A push whose slices are all here still counts.
  void Gone();
  // The call has ended: it gets no more slices. Nothing else is called any more.
  void Over();

 private:
  void Await(const ShardRequest& request, bool push_ended, Callback callback);
  std::chrono::nanoseconds WaitTime(uint32_t wait_ms) const;

  Shard& shard_;
  const std::string peer_;
  const bool this_host_;
  const WaitLimits limits_;
  BuildStreams::Callback stream_;  // Until the push has begun.
  bool opened_ = false;
  std::optional<v1::PushRequest> push_;  // The newest message's header.
  std::atomic<bool> gone_ = false;
};

}  // namespace ps
