// One call of the exchange to one shard: writes slices as they become ready, reads the reply.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include "absl/status/status.h"
#include "common/clock.h"
#include "common/codec.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// What a call brought: filled while it runs, to be read when it has ended.
struct ShardReply {
  PushAnswer answer = PushAnswer::kNone;
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t waited_us = 0;
  size_t slices = 0;  // Received.
  TimePoint first_reply_at;
  TimePoint written_at;  // The last message that went out, and that came in.
  TimePoint read_at;
};

class ShardCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                        public std::enable_shared_from_this<ShardCall> {
 public:
  enum class Kind { kInit, kPush, kPull, kPushPull };
  struct Request {
    Kind kind = Kind::kPull;
    v1::PushRequest push;  // Header of every message of a push; of Init, the identity.
    v1::PullRequest pull;
    const SlicePlan* plan = nullptr;
    uint32_t shard = 0;
    const ConstTensors* out = nullptr;   // What is sent; lives as long as the call.
    const MutableTensors* in = nullptr;  // Where what is received goes; likewise.
    // Whether a received slice is to be written to `in`, and that it was. May be empty; called from threads of gRPC.
    std::function<bool(uint32_t slice)> wants_slice;
    std::function<void(uint32_t slice)> on_slice;
    // Released when the call has ended and gRPC no longer reads `out`: after the call's end, unsent bytes may still be
    // in a connection's buffers.
    std::shared_ptr<void> hold;
    std::chrono::nanoseconds timeout;  // Of the whole call.
  };
  using EndFunction = std::function<void(const absl::Status&, const ShardReply&)>;

  // `on_end` is called once, from a thread of gRPC.
  ShardCall(Request request, EndFunction on_end);

  void Begin(const std::shared_ptr<grpc::Channel>& channel);
  // These slices (indexes in the model, of this shard) may be sent; `last`: there are no more. Before Begin they wait
  // for it.
  void Send(const std::vector<uint32_t>& slices, bool last);
  // Before Begin, it ends the call as soon as it has begun.
  void Cancel() { context_.TryCancel(); }

  // When it began, or a message last went out or came in. From any thread.
  TimePoint moved_at() const { return TimePoint(TimePoint::duration(moved_at_.load())); }

  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  bool sends_slices() const { return request_.kind != Kind::kPull; }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  grpc::ByteBuffer NextMessage() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnMessage();
  absl::Status TakeSlices(const std::vector<ReceivedSlice>& slices);
  TimePoint Moved();
  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Request request_;
  const EndFunction on_end_;
  std::shared_ptr<ShardCall> self_;  // gRPC's hold, until OnDone.
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer received_;
  ShardReply reply_;
  absl::Status read_error_;
  std::atomic<TimePoint::rep> moved_at_;

  Mutex mutex_;
  std::deque<uint32_t> queue_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  bool last_ ABSL_GUARDED_BY(mutex_) = false;
  bool wrote_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;  // Writes may still be started from outside of the call's reactions.
};

}  // namespace ps
