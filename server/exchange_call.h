// One data call, from its first message to its end.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/generic/async_generic_service.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/call_watch.h"
#include "server/exchange.h"
#include "server/shard.h"

namespace ps {

enum class ExchangeMethod { kInit, kPush, kPull, kPushPull, kHash };

// Of a call's path; nothing for what the exchange does not serve.
std::optional<ExchangeMethod> ParseExchangeMethod(const std::string& path);

// A push or initial values: read messages until the caller has said all, wait for the answer, write it. A pull or
// hashes: read one message, wait, write.
//
// gRPC runs one reaction at a time until the last message is read; from then on at most one wait is parked at the shard
// or one write is under way, and the wait's callback is the only one that moves the call on. Every stage is bounded: by
// the watch while bytes are to come or go, by the wait's own deadline at the shard.
class ExchangeCall final : public grpc::ServerGenericBidiReactor, public std::enable_shared_from_this<ExchangeCall> {
 public:
  // All outlive the call; the context is gRPC's, and lives until OnDone.
  ExchangeCall(Shard& shard, CallWatch& watch, const ExchangeLimits& limits,
               const grpc::GenericCallbackServerContext& context, ExchangeMethod method)
      : shard_(shard), watch_(watch), limits_(limits), context_(context), method_(method) {}

  // RESOURCE_EXHAUSTED: too many calls are open, and this one has not begun. Else gRPC's last reaction frees it.
  absl::Status Begin();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  bool reads() const { return method_ == ExchangeMethod::kPull || method_ == ExchangeMethod::kHash; }
  void Read();
  // The call is a member's, if the identity is.
  absl::Status Identify(const v1::Identity& id);
  absl::Status OnReadRequest();
  absl::Status OnMessage();
  void OnRequestsEnd();
  void OnPushAnswered(absl::StatusOr<v1::PushReply> reply);
  void Pull(const v1::Identity& id, std::optional<uint64_t> version, uint32_t wait_ms);
  void OnPinned(absl::StatusOr<VersionPin> pin);
  void WriteMore();
  void WriteLast(const grpc::ByteBuffer& message);
  void End(const absl::Status& status);
  void Parked(uint64_t wait);
  TimePoint Deadline(TimePoint now, uint32_t wait_ms) const;
  uint64_t WaitedUs() const;

  Shard& shard_;
  CallWatch& watch_;
  const ExchangeLimits& limits_;
  const grpc::GenericCallbackServerContext& context_;
  const ExchangeMethod method_;
  std::shared_ptr<ExchangeCall> self_;

  grpc::ByteBuffer message_;
  bool has_request_ = false;
  bool identified_ = false;
  v1::PushRequest push_;  // The newest message's header.
  TimePoint parked_at_;

  std::optional<VersionPin> pin_;
  v1::PullReply reply_;  // Header of the next message to write.
  size_t next_slice_ = 0;
  bool wrote_ = false;
  grpc::ByteBuffer outgoing_;

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t wait_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ps
