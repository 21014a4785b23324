#include "server/exchange_call.h"

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

std::optional<ExchangeMethod> ParseExchangeMethod(const std::string& path) {
  if (path == "/ps.v1.Shard/Init") return ExchangeMethod::kInit;
  if (path == "/ps.v1.Shard/Push") return ExchangeMethod::kPush;
  if (path == "/ps.v1.Shard/Pull") return ExchangeMethod::kPull;
  if (path == "/ps.v1.Shard/PushPull") return ExchangeMethod::kPushPull;
  if (path == "/ps.v1.Shard/HashSlices") return ExchangeMethod::kHash;
  return std::nullopt;
}

absl::Status ExchangeCall::Begin() {
  PS_RETURN_IF_ERROR(watch_.Add(this, context_.peer(), [this] { context_.TryCancel(); }));
  self_ = shared_from_this();  // gRPC's hold, until OnDone.
  Read();
  return absl::OkStatus();
}

void ExchangeCall::Read() {
  watch_.Receiving(this, reads() ? kMaxHeaderBytes : kMaxMessageBytes, Now());
  StartRead(&message_);
}

void ExchangeCall::OnReadDone(bool ok) {
  watch_.Waiting(this);
  if (!ok) return OnRequestsEnd();
  const absl::Status status = reads() ? OnReadRequest() : OnMessage();
  message_.Clear();
  if (!status.ok()) return End(status);
  // No more messages are read; from here on the wait's callback moves the call on.
  if (!reads()) Read();
}

void ExchangeCall::OnWriteDone(bool ok) {
  if (!ok) return End(absl::CancelledError("the caller disconnected"));
  WriteMore();
}

void ExchangeCall::OnCancel() {
  uint64_t wait = 0;
  {
    MutexLock lock(mutex_);
    cancelled_ = true;
    wait = wait_;
  }
  if (wait != 0) shard_.CancelWait(wait);
}

void ExchangeCall::OnDone() {
  watch_.Remove(this);  // From here on it is not cancelled any more, so the context may go.
  self_.reset();
}

// ---- Requests

absl::Status ExchangeCall::Identify(const v1::Identity& id) {
  if (identified_ || !shard_.IsMember(id)) return absl::OkStatus();
  identified_ = true;
  return watch_.Identify(this, id.rank(), id.incarnation());
}

absl::Status ExchangeCall::OnReadRequest() {
  if (method_ == ExchangeMethod::kPull) {
    v1::PullRequest request;
    PS_RETURN_IF_ERROR(DecodeSmall(message_, &request));
    PS_RETURN_IF_ERROR(Identify(request.id()));
    Pull(request.id(), request.has_version() ? std::optional<uint64_t>(request.version()) : std::nullopt,
         request.wait_ms());
    return absl::OkStatus();
  }
  v1::HashSlicesRequest request;
  PS_RETURN_IF_ERROR(DecodeSmall(message_, &request));
  PS_RETURN_IF_ERROR(Identify(request.id()));
  const TimePoint now = Now();
  Parked(shard_.AwaitHashes({.id = request.id(), .peer = context_.peer()},
                            request.has_version() ? std::optional<uint64_t>(request.version()) : std::nullopt, now,
                            Deadline(now, request.wait_ms()),
                            [self = shared_from_this()](const absl::StatusOr<v1::HashSlicesReply>& reply) {
                              if (!reply.ok()) return self->End(reply.status());
                              self->WriteLast(EncodeMessage(*reply));
                            }));
  return absl::OkStatus();
}

absl::Status ExchangeCall::OnMessage() {
  if (method_ == ExchangeMethod::kInit) {
    v1::InitRequest request;
    absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(message_, &request);
    if (!slices.ok()) return slices.status();
    PS_RETURN_IF_ERROR(Identify(request.id()));
    return shard_.AddInitialSlices(request.id(), *slices);
  }
  v1::PushRequest request;
  absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(message_, &request);
  if (!slices.ok()) return slices.status();
  if (has_request_ && (request.step() != push_.step() || request.id().rank() != push_.id().rank() ||
                       request.id().incarnation() != push_.id().incarnation())) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", push_.id().rank(), ", step ", push_.step(),
                                                   ": the call also carries rank ", request.id().rank(), ", step ",
                                                   request.step()));
  }
  PS_RETURN_IF_ERROR(CheckHeaderBytes(message_, *slices));
  PS_RETURN_IF_ERROR(Identify(request.id()));
  has_request_ = true;
  push_ = std::move(request);
  return shard_.AddSlices(push_, *std::move(slices), Now(), this);
}

void ExchangeCall::OnRequestsEnd() {
  // A broken or cancelled call looks like one that has sent everything; but another call may carry its push by now.
  if (context_.IsCancelled()) return End(absl::CancelledError("the caller disconnected"));
  if (method_ == ExchangeMethod::kInit) {
    const absl::Status initialised = shard_.CheckInitialised();
    if (!initialised.ok()) return End(initialised);
    return WriteLast(EncodeMessage(v1::InitReply()));
  }
  if (!has_request_) return End(absl::InvalidArgumentError("the call ended without a message"));
  const TimePoint now = Now();
  parked_at_ = now;
  const auto answered = [self = shared_from_this()](absl::StatusOr<v1::PushReply> reply) {
    self->OnPushAnswered(std::move(reply));
  };
  Parked(shard_.AwaitPush(push_, push_.calls() <= 1, now, Deadline(now, push_.wait_ms()), answered, this));
}

// ---- Answers

void ExchangeCall::OnPushAnswered(absl::StatusOr<v1::PushReply> reply) {
  if (!reply.ok()) return End(reply.status());
  reply->set_waited_us(WaitedUs());
  if (method_ == ExchangeMethod::kPush) return WriteLast(EncodeMessage(*reply));
  *reply_.mutable_push() = *std::move(reply);
  if (reply_.push().answer() == v1::ANSWER_FENCED) return WriteLast(EncodeMessage(reply_));
  Pull(push_.id(), shard_.VersionAfter(push_.step()), push_.wait_ms());
}

void ExchangeCall::Pull(const v1::Identity& id, std::optional<uint64_t> version, uint32_t wait_ms) {
  const TimePoint now = Now();
  if (method_ == ExchangeMethod::kPull) parked_at_ = now;
  Parked(shard_.AwaitPull(
      {.id = id, .peer = context_.peer()}, version, now, Deadline(now, wait_ms),
      [self = shared_from_this()](absl::StatusOr<VersionPin> pin) { self->OnPinned(std::move(pin)); }));
}

void ExchangeCall::OnPinned(absl::StatusOr<VersionPin> pin) {
  if (!pin.ok()) return End(pin.status());
  pin_ = *std::move(pin);
  reply_.set_version(pin_->version());
  reply_.set_waited_us(WaitedUs());
  WriteMore();
}

// The next message of the pinned version, or the end.
void ExchangeCall::WriteMore() {
  const SlicePlan& plan = *shard_.plan();
  const std::vector<uint32_t>& mine = plan.shard_slices(shard_.options().shard);
  if (wrote_ && next_slice_ == mine.size()) return End(absl::OkStatus());
  std::vector<OutgoingSlice> slices;
  size_t bytes = 0;
  for (; next_slice_ < mine.size(); ++next_slice_) {
    const SliceInfo& info = plan.slices()[mine[next_slice_]];
    if (bytes > 0 && bytes + static_cast<size_t>(info.bytes()) > kReplyBytes) break;
    bytes += static_cast<size_t>(info.bytes());
    slices.push_back(
        {.index = info.index,
         .values = pin_->weights().subspan(static_cast<size_t>(info.shard_offset), static_cast<size_t>(info.elements)),
         .release = [pin = *pin_] {}});
  }
  const grpc::ByteBuffer message = EncodeSlices(reply_, std::move(slices));
  reply_.clear_push();
  reply_.clear_waited_us();
  wrote_ = true;
  if (next_slice_ == mine.size()) {
    pin_.reset();  // The slices hold it now.
    return WriteLast(message);
  }
  outgoing_ = message;
  watch_.Sending(this, outgoing_.Length(), Now());
  StartWrite(&outgoing_);
}

void ExchangeCall::WriteLast(const grpc::ByteBuffer& message) {
  outgoing_ = message;
  watch_.Sending(this, outgoing_.Length(), Now());
  StartWriteAndFinish(&outgoing_, grpc::WriteOptions(), grpc::Status::OK);
}

void ExchangeCall::End(const absl::Status& status) {
  pin_.reset();
  watch_.Sending(this, 0, Now());
  Finish(ToGrpc(status));
}

// The call is parked under this number, unless it was answered already (0). It is cancelled if the caller disconnected
// meanwhile. The answer to a push may park the pull before the push's number gets here; numbers grow, so the newest is
// kept.
void ExchangeCall::Parked(uint64_t wait) {
  bool cancel = false;
  {
    MutexLock lock(mutex_);
    wait_ = std::max(wait_, wait);
    cancel = cancelled_;
  }
  if (cancel && wait != 0) shard_.CancelWait(wait);
}

TimePoint ExchangeCall::Deadline(TimePoint now, uint32_t wait_ms) const {
  const std::chrono::nanoseconds asked = std::chrono::milliseconds(wait_ms);
  return now + (wait_ms == 0 ? limits_.wait_default : std::min(asked, limits_.wait_max));
}

uint64_t ExchangeCall::WaitedUs() const {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(Now() - parked_at_).count());
}

}  // namespace ps
