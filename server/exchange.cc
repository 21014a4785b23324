#include "server/exchange.h"

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
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
                                                 " bytes of slices; at most ", kMaxHeaderBytes, " may be others"));
}

enum class Method { kInit, kPush, kPull, kPushPull };

std::optional<Method> ParseMethod(const std::string& path) {
  if (path == "/ps.v1.Shard/Init") return Method::kInit;
  if (path == "/ps.v1.Shard/Push") return Method::kPush;
  if (path == "/ps.v1.Shard/Pull") return Method::kPull;
  if (path == "/ps.v1.Shard/PushPull") return Method::kPushPull;
  return std::nullopt;
}

// Calls nobody serves.
class Unimplemented final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Unimplemented(const std::string& method) {
    Finish({grpc::StatusCode::UNIMPLEMENTED, absl::StrCat("no method ", method)});
  }
  void OnDone() override { delete this; }
};

// One call: read messages until the caller has said all, wait for the answer, write it.
//
// gRPC runs one reaction at a time until the caller's last message is read; from then on at most one wait is parked at
// the shard or one write is under way, and the wait's callback is the only one that moves the call on.
class ExchangeCall final : public grpc::ServerGenericBidiReactor, public std::enable_shared_from_this<ExchangeCall> {
 public:
  ExchangeCall(Shard& shard, const ExchangeLimits& limits, const grpc::GenericCallbackServerContext& context,
               Method method)
      : shard_(shard), limits_(limits), context_(context), method_(method) {}

  void Begin() {
    self_ = shared_from_this();  // gRPC's hold, until OnDone.
    StartRead(&message_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return OnRequestsEnd();
    const absl::Status status = OnMessage();
    message_.Clear();
    if (!status.ok()) return End(status);
    StartRead(&message_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the caller is gone"));
    WriteMore();
  }

  void OnCancel() override {
    uint64_t wait = 0;
    {
      MutexLock lock(mutex_);
      cancelled_ = true;
      wait = wait_;
    }
    if (wait != 0) shard_.CancelWait(wait);
  }

  void OnDone() override { self_.reset(); }

 private:
  absl::Status OnMessage() {
    switch (method_) {
      case Method::kInit: {
        v1::InitRequest request;
        absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(message_, &request);
        if (!slices.ok()) return slices.status();
        return shard_.AddInitialSlices(request.id(), *slices);
      }
      case Method::kPull:
        if (has_request_) return absl::InvalidArgumentError("a pull is one message");
        has_request_ = true;
        return DecodeMessage(message_, &pull_);
      default:
        break;
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
    has_request_ = true;
    push_ = std::move(request);
    return shard_.AddSlices(push_, *std::move(slices), Now(), this);
  }

  void OnRequestsEnd() {
    // A broken or cancelled call ends like one that has said all; but its push may be on its way in another by now.
    if (context_.IsCancelled()) return End(absl::CancelledError("the caller is gone"));
    if (method_ == Method::kInit) {
      const absl::Status initialised = shard_.CheckInitialised();
      if (!initialised.ok()) return End(initialised);
      return WriteLast(EncodeMessage(v1::InitReply()));
    }
    if (!has_request_) return End(absl::InvalidArgumentError("the call ended without a message"));
    if (method_ == Method::kPull) {
      return Pull(pull_.id(), pull_.has_version() ? std::optional<uint64_t>(pull_.version()) : std::nullopt,
                  pull_.wait_ms());
    }
    const TimePoint now = Now();
    parked_at_ = now;
    const auto answered = [self = shared_from_this()](absl::StatusOr<v1::PushReply> reply) {
      self->OnPushAnswered(std::move(reply));
    };
    Parked(shard_.AwaitPush(push_, push_.calls() <= 1, now, Deadline(now, push_.wait_ms()), answered, this));
  }

  void OnPushAnswered(absl::StatusOr<v1::PushReply> reply) {
    if (!reply.ok()) return End(reply.status());
    reply->set_waited_us(WaitedUs());
    if (method_ == Method::kPush) return WriteLast(EncodeMessage(*reply));
    *reply_.mutable_push() = *std::move(reply);
    if (reply_.push().answer() == v1::FENCED) return WriteLast(EncodeMessage(reply_));
    Pull(push_.id(), shard_.VersionAfter(push_.step()), push_.wait_ms());
  }

  void Pull(const v1::Identity& id, std::optional<uint64_t> version, uint32_t wait_ms) {
    const TimePoint now = Now();
    if (method_ == Method::kPull) parked_at_ = now;
    Parked(shard_.AwaitPull(
        id, version, now, Deadline(now, wait_ms),
        [self = shared_from_this()](absl::StatusOr<VersionPin> pin) { self->OnPinned(std::move(pin)); }));
  }

  void OnPinned(absl::StatusOr<VersionPin> pin) {
    if (!pin.ok()) return End(pin.status());
    pin_ = *std::move(pin);
    reply_.set_version(pin_->version());
    reply_.set_waited_us(WaitedUs());
    WriteMore();
  }

  // The next message of the pinned version, or the end.
  void WriteMore() {
    const SlicePlan& plan = *shard_.plan();
    const std::vector<uint32_t>& mine = plan.shard_slices(shard_.options().shard);
    if (wrote_ && next_slice_ == mine.size()) return End(absl::OkStatus());
    std::vector<OutgoingSlice> slices;
    size_t bytes = 0;
    for (; next_slice_ < mine.size(); ++next_slice_) {
      const SliceInfo& info = plan.slices()[mine[next_slice_]];
      if (bytes > 0 && bytes + static_cast<size_t>(info.bytes()) > kReplyBytes) break;
      bytes += static_cast<size_t>(info.bytes());
      slices.push_back({.index = info.index,
                        .values = pin_->weights().subspan(static_cast<size_t>(info.shard_offset),
                                                          static_cast<size_t>(info.elements)),
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
    StartWrite(&outgoing_);
  }

  void WriteLast(const grpc::ByteBuffer& message) {
    outgoing_ = message;
    StartWriteAndFinish(&outgoing_, grpc::WriteOptions(), grpc::Status::OK);
  }

  void End(const absl::Status& status) {
    pin_.reset();
    Finish(ToGrpc(status));
  }

  // The call is parked under this number, unless it was answered already (0). If the caller went meanwhile, so does it.
  // The answer to a push may park the pull before the push's number gets here; numbers grow, so the newest stays.
  void Parked(uint64_t wait) {
    bool cancel = false;
    {
      MutexLock lock(mutex_);
      wait_ = std::max(wait_, wait);
      cancel = cancelled_;
    }
    if (cancel && wait != 0) shard_.CancelWait(wait);
  }

  TimePoint Deadline(TimePoint now, uint32_t wait_ms) const {
    const std::chrono::nanoseconds asked = std::chrono::milliseconds(wait_ms);
    return now + (wait_ms == 0 ? limits_.wait_default : std::min(asked, limits_.wait_max));
  }

  uint64_t WaitedUs() const {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(Now() - parked_at_).count());
  }

  Shard& shard_;
  const ExchangeLimits& limits_;
  const grpc::GenericCallbackServerContext& context_;  // gRPC's; lives until OnDone.
  const Method method_;
  std::shared_ptr<ExchangeCall> self_;

  grpc::ByteBuffer message_;
  bool has_request_ = false;
  v1::PushRequest push_;  // The newest message's header.
  v1::PullRequest pull_;
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

}  // namespace

grpc::ServerGenericBidiReactor* ExchangeService::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const std::optional<Method> method = ParseMethod(context->method());
  if (!method.has_value()) return new Unimplemented(context->method());
  auto call = std::make_shared<ExchangeCall>(shard_, limits_, *context, *method);
  call->Begin();
  return call.get();
}

}  // namespace ps
