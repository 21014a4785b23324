// One call of a server, on raw bytes, from its first message to its end: what every kind of call has in common.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <grpcpp/generic/async_generic_service.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/codec.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "common/sync.h"
#include "server/transport/call_watch.h"

namespace ps {

// The reads, writes and the end of a call, under the eyes of a CallWatch. A kind of call derives from it, begins with
// Read, and says what its messages mean. A message's size is looked at before it is parsed.
//
// Thread-safe. gRPC runs one of OnMessage, OnMessagesEnd and OnWritten at a time as long as there is one read or write
// under way: a kind that writes while it reads locks what they share. OnGone may run beside them. The first end counts:
// after it nothing is read or written any more. Lock order: the derived call's locks, then this one's, then the
// watch's.
class ServerCall : public grpc::ServerGenericBidiReactor, public SelfOwned<ServerCall> {
 public:
  // Both outlive the call; the context is gRPC's, and lives until OnDone.
  ServerCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context)
      : watch_(watch), context_(context), link_(LinkOfPeer(context.peer())) {}

  // RESOURCE_EXHAUSTED: too many calls are open, and this one has not begun. Else gRPC's last reaction frees it.
  absl::Status Begin();

  // Answers with an error, or with what was written so far.
  void End(const absl::Status& status);

 protected:
  // ---- What a kind of call says

  // Begins to read the first message.
  virtual void OnBegin() = 0;
  // A message of no more than the bytes that were asked for. An error ends the call.
  virtual absl::Status OnMessage(const grpc::ByteBuffer& message) = 0;
  // The caller has said all that it will, or it is gone: gone() may tell which.
  virtual void OnMessagesEnd() {}
  // What Write wrote is on its way; now the next may be written.
  virtual void OnWritten() {}
  // The caller disconnected, or the watch ended the call. Called once at most; the call ends after it.
  virtual void OnGone() {}
  // The call is over and its last message was sent, or cannot be.
  virtual void OnOver() {}

  // ---- What it does; one read and one write at a time

  // The next message, of at most this many bytes; INVALID_ARGUMENT ends the call for a larger one. It must come within
  // the watch's time, unless a member sends it.
  void Read(size_t max_bytes) { StartReading(max_bytes, /*in_time=*/true); }
  // The same for a stream that may be silent for any time.
  void ReadWhenever(size_t max_bytes) { StartReading(max_bytes, /*in_time=*/false); }
  void Write(const grpc::ByteBuffer& message);
  // The last message, and the end.
  void Answer(const grpc::ByteBuffer& message);

  // This call, for an answer that is still to come: `self = Self(this)`.
  template <typename Call>
  static std::shared_ptr<Call> Self(Call* call) {
    return std::static_pointer_cast<Call>(call->shared_from_this());
  }

  bool gone() const { return gone_ || context_.IsCancelled(); }
  CallWatch& watch() { return watch_; }
  const grpc::GenericCallbackServerContext& context() const { return context_; }

 private:
  void OnReadDone(bool ok) final;
  void OnWriteDone(bool ok) final;
  void OnCancel() final;
  void OnDone() final;
  void StartReading(size_t max_bytes, bool in_time);

  CallWatch& watch_;
  const grpc::GenericCallbackServerContext& context_;
  const LinkKind link_;
  grpc::ByteBuffer incoming_;  // While it is read, gRPC's; then the reaction's.
  size_t max_bytes_ = 0;       // The message that is read has so many at most.
  std::atomic<bool> gone_ = false;
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
};

// A request that has no more than names, numbers and a reason is smaller than this.
inline constexpr size_t kMaxSmallRequestBytes = 64 << 10;

// Reads one request, and is answered by whoever derives from it.
template <typename Request, typename Base = ServerCall, size_t kMaxBytes = kMaxSmallRequestBytes>
class RequestCall : public Base {
 public:
  using Base::Base;

 protected:
  // An error ends the call. Else Answer or End does, now or later.
  virtual absl::Status OnRequest(const Request& request) = 0;

  template <typename Reply>
  void AnswerOrEnd(const absl::StatusOr<Reply>& reply) {
    if (!reply.ok()) return this->End(reply.status());
    this->Answer(EncodeMessage(*reply));
  }

 private:
  void OnBegin() final { this->Read(kMaxBytes); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) final {
    Request request;
    PS_RETURN_IF_ERROR(DecodeMessage(message, &request));
    // The identity of a call to a shard is kept while it is parked. (Requests to the chief have maps, in which protobuf
    // looks by reflection: that ends a program of the thread sanitizer.)
    if constexpr (!std::is_same_v<Base, ServerCall>) request.DiscardUnknownFields();
    return OnRequest(request);
  }
  void OnMessagesEnd() final { this->End(absl::InvalidArgumentError("the call ended without a message")); }
};

// A call that is answered with a stream of states. Only the newest state matters: one that is not sent yet is replaced.
template <typename Request>
class StateCall : public RequestCall<Request> {
 public:
  using RequestCall<Request>::RequestCall;

  // Thread-safe, in order.
  void Tell(const grpc::ByteBuffer& state) {
    MutexLock lock(mutex_);
    next_ = state;
    WriteNext();
  }

 private:
  void OnWritten() final {
    MutexLock lock(mutex_);
    writing_ = false;
    WriteNext();
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || !next_.has_value()) return;
    writing_ = true;
    this->Write(*std::exchange(next_, std::nullopt));
  }

  Mutex mutex_;
  std::optional<grpc::ByteBuffer> next_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

// Calls of this path are answered at once, by a function that is called in threads of gRPC.
template <typename Request, typename Reply>
void HandleRequests(CallRouter& router, const std::string& path,
                    std::function<absl::StatusOr<Reply>(const Request&)> answer) {
  class AnsweredCall final : public RequestCall<Request> {
   public:
    AnsweredCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context,
                 const std::function<absl::StatusOr<Reply>(const Request&)>& answer)
        : RequestCall<Request>(watch, context), answer_(answer) {}

   private:
    absl::Status OnRequest(const Request& request) override {
      this->AnswerOrEnd(answer_(request));
      return absl::OkStatus();
    }
    const std::function<absl::StatusOr<Reply>(const Request&)>& answer_;  // The router's.
  };
  router.Handle(path, [&router, answer = std::move(answer)](const grpc::GenericCallbackServerContext& context) {
    return CallRouter::Begun(std::make_shared<AnsweredCall>(router.watch(), context, answer));
  });
}

}  // namespace ps
