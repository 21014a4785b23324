// One data call of service Shard over gRPC: a thin adapter on PushPullSession. It reads raw messages, so that payloads
// are neither copied nor parsed by generated code and a request's size is looked at before it is parsed, and writes the
// slices of a pinned version by reference.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/generic/async_generic_service.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/v1/ps.pb.h"
#include "server/call_watch.h"
#include "server/push_pull_session.h"
#include "server/shard.h"

namespace ps {

enum class DataMethod { kInit, kPush, kPull, kPushPull, kHash };

// Of a call's path; nothing for what is no data call.
std::optional<DataMethod> ParseDataMethod(const std::string& path);

// A push or initial values: read messages until the caller has said all, wait for the answer, write it. A pull or
// hashes: read one message, wait, write.
//
// gRPC runs one reaction at a time until the last message is read; from then on at most one request is parked at the
// shard or one write is under way, and the request's callback is the only one that moves the call on. Every stage is
// bounded: by the watch while bytes are to come or go, by the request's own deadline at the shard.
class GrpcDataCall final : public grpc::ServerGenericBidiReactor, public std::enable_shared_from_this<GrpcDataCall> {
 public:
  // All outlive the call; the context is gRPC's, and lives until OnDone.
  GrpcDataCall(Shard& shard, CallWatch& watch, const WaitLimits& limits,
               const grpc::GenericCallbackServerContext& context, DataMethod method)
      : shard_(shard), watch_(watch), context_(context), method_(method), session_(shard, context.peer(), limits) {}

  // RESOURCE_EXHAUSTED: too many calls are open, and this one has not begun. Else gRPC's last reaction frees it.
  absl::Status Begin();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  bool reads() const { return method_ == DataMethod::kPull || method_ == DataMethod::kHash; }
  void Read();
  // The call is a member's, if the identity is.
  absl::Status Identify(const v1::Identity& id);
  absl::Status OnReadRequest();
  absl::Status OnMessage();
  void OnRequestsEnd();
  PushPullSession::Callback OnReply();
  void WriteMore();
  void WriteLast(const grpc::ByteBuffer& message);
  void End(const absl::Status& status);

  Shard& shard_;
  CallWatch& watch_;
  const grpc::GenericCallbackServerContext& context_;
  const DataMethod method_;
  PushPullSession session_;
  std::shared_ptr<GrpcDataCall> self_;  // gRPC's hold, until OnDone.

  grpc::ByteBuffer message_;
  bool identified_ = false;
  v1::PullReply reply_;            // Header of the next message to write.
  std::optional<VersionPin> pin_;  // What is written.
  size_t next_slice_ = 0;          // Local index.
  grpc::ByteBuffer outgoing_;
};

}  // namespace ps
