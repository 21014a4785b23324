// The control calls: service Chief, and what service Shard has besides its data. Thin handlers: decode, delegate,
// finish.
#pragma once

#include <functional>
#include <optional>

#include "ps/v1/ps.pb.h"
#include "server/chief/chief.h"
#include "server/transport/call_watch.h"
#include "server/transport/follower.h"
#include "server/transport/server_call.h"

namespace ps {

// The calls of service Chief. Router and chief outlive the gRPC server.
void HandleChiefCalls(CallRouter& router, Chief& chief);

// ShardStatus, as `status` says it in threads of gRPC.
void HandleShardStatus(CallRouter& router, std::function<v1::ShardStatusReply()> status);

// The chief's end of a shard's stream (Chief.Follow).
//
// Registers the shard with its first report, passes on the others, and sends it the chief's updates, in order. A shard
// that does not read them is cut off.
class FollowCall final : public ServerCall {
 public:
  // The chief outlives the call.
  FollowCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context, Chief& chief)
      : ServerCall(watch, context), chief_(chief) {}

 private:
  void OnBegin() override { Read(kMaxRegistrationBytes); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) override;
  void OnMessagesEnd() override { End(absl::OkStatus()); }
  void OnWritten() override;
  void OnOver() override;

  absl::Status Register(const v1::ShardReport& report);
  void Send(const v1::ChiefUpdate& update);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Chief& chief_;
  // Known once the shard is registered. Both are used by reactions on messages, one at a time.
  std::optional<uint32_t> shard_;
  uint64_t connection_ = 0;
  Mutex mutex_;
  UpdateQueue queue_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ps
