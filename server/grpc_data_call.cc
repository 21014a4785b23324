#include "server/grpc_data_call.h"

#include "absl/strings/str_cat.h"
#include "common/codec.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/status.h"

namespace ps {
namespace {

// Payload of a reply message: up to a full slice (tests/bench/TRIALS.md).
constexpr size_t kReplyBytes = kSliceElements * sizeof(float);

// What a message may hold beside its payload. All of it is kept as long as the payload is, and only that is reserved.
constexpr size_t kMaxHeaderBytes = 64 << 10;

absl::Status CheckHeaderBytes(const grpc::ByteBuffer& message, const std::vector<ReceivedSlice>& slices) {
  size_t payload = 0;
  for (const ReceivedSlice& slice : slices) payload += slice.payload.bytes();
  if (message.Length() <= payload + kMaxHeaderBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a message of ", message.Length(), " bytes with only ", payload,
                                                 " bytes of slices; of other bytes at most ", kMaxHeaderBytes,
                                                 " are allowed"));
}

// A request without slices: small, and looked at before it is parsed.
template <typename Request>
absl::Status DecodeSmall(const grpc::ByteBuffer& message, Request* request) {
  if (message.Length() > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a request of ", message.Length(), " bytes; at most ", kMaxHeaderBytes, " are allowed"));
  }
  PS_RETURN_IF_ERROR(DecodeMessage(message, request));
  request->DiscardUnknownFields();
  return absl::OkStatus();
}

}  // namespace

std::optional<DataMethod> ParseDataMethod(const std::string& path) {
  if (path == "/ps.v1.Shard/Init") return DataMethod::kInit;
  if (path == "/ps.v1.Shard/Push") return DataMethod::kPush;
  if (path == "/ps.v1.Shard/Pull") return DataMethod::kPull;
  if (path == "/ps.v1.Shard/PushPull") return DataMethod::kPushPull;
  if (path == "/ps.v1.Shard/HashSlices") return DataMethod::kHash;
  return std::nullopt;
}

absl::Status GrpcDataCall::Begin() {
  PS_RETURN_IF_ERROR(watch_.Add(this, context_.peer(), [this] { context_.TryCancel(); }));
  self_ = shared_from_this();  // gRPC's hold, until OnDone.
  Read();
  return absl::OkStatus();
}

void GrpcDataCall::Read() {
  watch_.Receiving(this, reads() ? kMaxHeaderBytes : kMaxMessageBytes, Now());
  StartRead(&message_);
}

void GrpcDataCall::OnReadDone(bool ok) {
  watch_.Waiting(this);
  if (!ok) return OnRequestsEnd();
  const absl::Status status = reads() ? OnReadRequest() : OnMessage();
  message_.Clear();
  if (!status.ok()) return End(status);
  // No more messages are read; from here on the wait's callback moves the call on.
  if (!reads()) Read();
}

void GrpcDataCall::OnWriteDone(bool ok) {
  if (!ok) return End(absl::CancelledError("the caller disconnected"));
  WriteMore();
}

void GrpcDataCall::OnCancel() { session_.Gone(); }

void GrpcDataCall::OnDone() {
  watch_.Remove(this);  // From here on it is not cancelled any more, so the context may go.
  self_.reset();
}

// ---- Requests

absl::Status GrpcDataCall::Identify(const v1::Identity& id) {
  if (identified_ || !shard_.IsMember(id)) return absl::OkStatus();
  identified_ = true;
  return watch_.Identify(this, id.rank(), id.incarnation());
}

absl::Status GrpcDataCall::OnReadRequest() {
  if (method_ == DataMethod::kPull) {
    v1::PullRequest request;
    PS_RETURN_IF_ERROR(DecodeSmall(message_, &request));
    PS_RETURN_IF_ERROR(Identify(request.id()));
    session_.Pull(request, OnReply());
    return absl::OkStatus();
  }
  v1::HashSlicesRequest request;
  PS_RETURN_IF_ERROR(DecodeSmall(message_, &request));
  PS_RETURN_IF_ERROR(Identify(request.id()));
  session_.Hash(request, [self = shared_from_this()](const absl::StatusOr<v1::HashSlicesReply>& reply) {
    if (!reply.ok()) return self->End(reply.status());
    self->WriteLast(EncodeMessage(*reply));
  });
  return absl::OkStatus();
}

absl::Status GrpcDataCall::OnMessage() {
  if (method_ == DataMethod::kInit) {
    v1::InitRequest request;
    absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(message_, &request);
    if (!slices.ok()) return slices.status();
    PS_RETURN_IF_ERROR(Identify(request.id()));
    return shard_.AddInitialSlices(request.id(), *slices);
  }
  v1::PushRequest request;
  absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(message_, &request);
  if (!slices.ok()) return slices.status();
  PS_RETURN_IF_ERROR(CheckHeaderBytes(message_, *slices));
  PS_RETURN_IF_ERROR(Identify(request.id()));
  return session_.Add(std::move(request), *std::move(slices));
}

void GrpcDataCall::OnRequestsEnd() {
  // A broken or cancelled call looks like one that has sent everything; but another call may carry its push by now.
  if (context_.IsCancelled()) return End(absl::CancelledError("the caller disconnected"));
  if (method_ != DataMethod::kInit) return session_.Finish(method_ == DataMethod::kPushPull, OnReply());
  const absl::Status initialised = shard_.CheckInitialised();
  if (!initialised.ok()) return End(initialised);
  WriteLast(EncodeMessage(v1::InitReply()));
}

// ---- Answers

PushPullSession::Callback GrpcDataCall::OnReply() {
  return [self = shared_from_this()](absl::StatusOr<PushPullSession::Reply> reply) {
    if (!reply.ok()) return self->End(reply.status());
    if (self->method_ == DataMethod::kPush) return self->WriteLast(EncodeMessage(reply->header.push()));
    if (!reply->weights.has_value()) return self->WriteLast(EncodeMessage(reply->header));
    self->reply_ = std::move(reply->header);
    self->pin_ = *std::move(reply->weights);
    self->WriteMore();
  };
}

// The next message of the pinned version, or the end.
void GrpcDataCall::WriteMore() {
  const ShardLayout& layout = pin_->layout();
  std::vector<OutgoingSlice> slices;
  size_t bytes = 0;
  for (; next_slice_ < layout.slices(); ++next_slice_) {
    const SliceInfo& info = layout.slice(next_slice_);
    if (bytes > 0 && bytes + static_cast<size_t>(info.bytes()) > kReplyBytes) break;
    bytes += static_cast<size_t>(info.bytes());
    slices.push_back({.index = info.index, .values = pin_->slice(next_slice_), .release = [pin = *pin_] {}});
  }
  const bool last = next_slice_ == layout.slices();
  const grpc::ByteBuffer message = EncodeSlices(reply_, std::move(slices));
  reply_.clear_push();
  reply_.clear_waited_us();
  if (last) {
    pin_.reset();  // The slices hold it now.
    return WriteLast(message);
  }
  outgoing_ = message;
  watch_.Sending(this, outgoing_.Length(), Now());
  StartWrite(&outgoing_);
}

void GrpcDataCall::WriteLast(const grpc::ByteBuffer& message) {
  outgoing_ = message;
  watch_.Sending(this, outgoing_.Length(), Now());
  StartWriteAndFinish(&outgoing_, grpc::WriteOptions(), grpc::Status::OK);
}

void GrpcDataCall::End(const absl::Status& status) {
  pin_.reset();
  watch_.Sending(this, 0, Now());
  Finish(ToGrpc(status));
}

}  // namespace ps
