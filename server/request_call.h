// Calls of one request: answered once, or with a stream of states.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/codec.h"
#include "common/status.h"
#include "server/call_router.h"
#include "server/server_call.h"

namespace ps {

// A request that has no more than names, numbers and a reason is smaller than this.
inline constexpr size_t kMaxSmallRequestBytes = 64 << 10;

// Reads one request, and is answered by whoever derives from it.
template <typename Request>
class RequestCall : public ServerCall {
 public:
  RequestCall(CallWatch& watch, const grpc::GenericCallbackServerContext& context,
              size_t max_bytes = kMaxSmallRequestBytes)
      : ServerCall(watch, context), max_bytes_(max_bytes) {}

 protected:
  // An error ends the call. Else Answer or End does, now or later.
  virtual absl::Status OnRequest(const Request& request) = 0;

  template <typename Reply>
  void AnswerOrEnd(const absl::StatusOr<Reply>& reply) {
    if (!reply.ok()) return End(reply.status());
    Answer(EncodeMessage(*reply));
  }

 private:
  void OnBegin() final { Read(max_bytes_); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) final {
    Request request;
    PS_RETURN_IF_ERROR(DecodeMessage(message, &request));
    return OnRequest(request);
  }
  void OnMessagesEnd() final { End(absl::InvalidArgumentError("the call ended without a message")); }

  const size_t max_bytes_;
};

// Answered with a stream of states, of which only the newest matters: one that is not sent yet is replaced.
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
