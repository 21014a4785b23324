#include "worker/link/grpc_shard_link.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include "absl/strings/match.h"
#include "common/codec.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "common/sync.h"
#include "worker/link/call_messages.h"

namespace ps {
namespace {

const char* MethodPath(CallKind kind) {
  switch (kind) {
    case CallKind::kInit:
      return "/ps.v1.Shard/Init";
    case CallKind::kPush:
      return "/ps.v1.Shard/Push";
    case CallKind::kPull:
      return "/ps.v1.Shard/Pull";
    case CallKind::kPushPull:
      break;
  }
  return "/ps.v1.Shard/PushPull";
}

uint64_t PayloadBytes(const std::vector<ReceivedSlice>& slices) {
  uint64_t bytes = 0;
  for (const ReceivedSlice& slice : slices) bytes += slice.payload.wire_bytes();
  return bytes;
}

// Constant.
struct Target {
  std::shared_ptr<grpc::Channel> channel;
  std::string address;
  uint32_t shard;
  const SlicePlan& plan;
  v1::Identity id;
  size_t message_bytes;
  Traffic::Link link;  // What the address is of.
};

class GrpcShardCall final : public ShardCall,
                            public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                            public std::enable_shared_from_this<GrpcShardCall> {
 public:
  GrpcShardCall(const Target& target, CallRequest request, EndFunction on_end)
      : target_(target),
        request_(std::move(request)),
        on_end_(std::move(on_end)),
        pulled_(request_.pulled == nullptr ? nullptr : request_.pulled->TakeUse(target.shard)),
        base_(pulled_ == nullptr ? std::nullopt : pulled_->version()),
        stub_(target.channel),
        made_at_(Now()),
        moved_at_(made_at_.time_since_epoch().count()),
        messages_(target.plan, target.id, request_, base_, target.message_bytes) {}

  void Begin() override;
  void Send(const std::vector<uint32_t>& slices, bool last) override;
  void Cancel() override {
    cancelled_ = true;
    context_.TryCancel();
  }
  TimePoint moved_at() const override { return TimePoint(TimePoint::duration(moved_at_.load())); }
  // A message, which gRPC tells of when it is whole.
  int64_t unseen_bytes() const override {
    return std::min<int64_t>(kMostMessageSliceBytes,
                             static_cast<int64_t>(target_.plan.shard_elements(target_.shard) * sizeof(float)));
  }

  void OnReadInitialMetadataDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OnMessage();
  // The answer came: what is here of this build is the version's.
  void Commit(uint64_t build);
  // What came of a build does not count.
  void Forget();
  absl::Status TakeEarly(uint64_t build, const std::vector<ReceivedSlice>& slices);
  absl::Status TakeSlices(const std::vector<ReceivedSlice>& slices);
  // Sees that it is one of this shard's, and has not come before.
  absl::Status Count(const ReceivedSlice& slice);
  bool Fits(const ReceivedSlice& slice) const;
  // Copies it to where it belongs, if it is wanted; returns whether it is.
  bool Write(const ReceivedSlice& slice);
  TimePoint Moved();
  void EndWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Target& target_;
  const CallRequest request_;
  const EndFunction on_end_;
  std::unique_ptr<PulledWeights::Use> pulled_;  // Until the end.
  const std::optional<uint64_t> base_;   // That this side has; replies may have no more than what has changed since.
  std::shared_ptr<GrpcShardCall> self_;  // gRPC's hold on the call, until OnDone.
  grpc::GenericStub stub_;
  std::atomic<bool> cancelled_ = false;  // By this side.
  grpc::ClientContext context_;
  const TimePoint made_at_;
  std::atomic<TimePoint::rep> moved_at_;
  std::atomic<TimePoint::rep> reply_began_at_ = 0;  // The answer's first bytes are here; 0: none are.
  // These belong to the reads, which gRPC reports one after the other, and to the end, which follows the last of them.
  grpc::ByteBuffer received_;
  std::vector<bool> received_slices_;  // By slice of the model; empty before the first.
  // Slices of a version in the making (PullReply.build), of which nobody is told before it is committed: those that
  // were written where they belong, and those that could not be yet.
  uint64_t build_ = 0;
  std::vector<uint32_t> written_;
  std::vector<ReceivedSlice> kept_;
  bool committed_ = false;
  bool wrote_all_ = true;  // Slices that came.
  ShardReply reply_;
  absl::Status read_error_;

  Mutex mutex_;
  OutgoingMessages messages_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  bool last_ ABSL_GUARDED_BY(mutex_) = false;
  bool wrote_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  // Writes may still be started from outside of the call's reactions, so gRPC must not end it (AddHold).
  bool writes_open_ ABSL_GUARDED_BY(mutex_) = false;
};

// Reactions of reads and of writes may overlap.
TimePoint GrpcShardCall::Moved() {
  const TimePoint now = Now();
  TimePoint::rep before = moved_at_;
  while (before < now.time_since_epoch().count() &&
         !moved_at_.compare_exchange_weak(before, now.time_since_epoch().count())) {
  }
  return now;
}

void GrpcShardCall::Begin() {
  self_ = shared_from_this();
  SetDeadline(context_, request_.timeout);
  // The server hears of a push with its first slice: it does not wait long for what a call is to bring.
  context_.set_initial_metadata_corked(SendsSlices(request_.kind));
  stub_.PrepareBidiStreamingCall(&context_, MethodPath(request_.kind), {}, this);
  StartRead(&received_);
  {
    MutexLock lock(mutex_);
    begun_ = true;
    if (!SendsSlices(request_.kind)) {
      writing_ = true;
      outgoing_ = messages_.Pull();
      StartWriteLast(&outgoing_, grpc::WriteOptions());
    } else {
      AddHold();
      writes_open_ = true;
      WriteNext();
    }
  }
  StartCall();
}

void GrpcShardCall::Send(const std::vector<uint32_t>& slices, bool last) {
  MutexLock lock(mutex_);
  if (begun_ && !writes_open_) return;  // It failed, or all is sent.
  messages_.Add(slices);
  last_ = last_ || last;
  if (begun_ && !writing_) WriteNext();
}

void GrpcShardCall::WriteNext() {
  if (messages_.empty() && !last_) return;
  writing_ = true;
  if (messages_.empty() && wrote_) {  // All was sent before it was known to be all.
    StartWritesDone();
    return EndWrites();
  }
  const uint64_t before = messages_.payload_bytes();
  outgoing_ = messages_.Next();
  if (request_.traffic != nullptr) request_.traffic->CountSent(target_.link, messages_.payload_bytes() - before);
  wrote_ = true;
  if (messages_.empty() && last_) {
    StartWriteLast(&outgoing_, grpc::WriteOptions());
    EndWrites();
  } else {
    StartWrite(&outgoing_);
  }
}

void GrpcShardCall::EndWrites() {
  if (std::exchange(writes_open_, false)) RemoveHold();
}

void GrpcShardCall::OnWriteDone(bool ok) {
  MutexLock lock(mutex_);
  writing_ = false;
  outgoing_.Clear();
  if (!ok) {
    messages_.Clear();
    EndWrites();
  } else {
    Moved();
    if (writes_open_) WriteNext();
  }
}

// Servers send it with the first message, which may be large: it is here before the message is.
void GrpcShardCall::OnReadInitialMetadataDone(bool ok) {
  if (ok) reply_began_at_ = Moved().time_since_epoch().count();
}

void GrpcShardCall::OnReadDone(bool ok) {
  if (!ok) {
    MutexLock lock(mutex_);
    EndWrites();  // The server has ended the call.
    return;
  }
  Moved();
  if (read_error_.ok()) {
    read_error_ = OnMessage();
    if (!read_error_.ok()) context_.TryCancel();
  }
  received_.Clear();
  StartRead(&received_);
}

absl::Status GrpcShardCall::OnMessage() {
  if (request_.kind == CallKind::kInit) return absl::OkStatus();
  if (request_.kind == CallKind::kPush) {
    v1::PushReply push;
    PS_RETURN_IF_ERROR(DecodeMessage(received_, &push));
    TakePush(push, /*only=*/true, &reply_);
    return absl::OkStatus();
  }
  v1::PullReply pull;
  PS_ASSIGN_OR_RETURN(std::vector<ReceivedSlice> slices, DecodeSlices(received_, &pull));
  if (request_.traffic != nullptr) request_.traffic->CountReceived(target_.link, PayloadBytes(slices));
  for (ReceivedSlice& slice : slices) {
    if (slice.payload.has_positions()) PS_RETURN_IF_ERROR(slice.payload.Unpack());
  }
  if (pull.build() > 0 && !pull.has_push() && request_.stream && !committed_) return TakeEarly(pull.build(), slices);
  PS_RETURN_IF_ERROR(TakePull(pull, &reply_));
  if (!std::exchange(committed_, true)) Commit(pull.build());
  return TakeSlices(slices);
}

absl::Status GrpcShardCall::TakeEarly(uint64_t build, const std::vector<ReceivedSlice>& slices) {
  if (build != build_) Forget();
  build_ = build;
  for (const ReceivedSlice& slice : slices) {
    PS_RETURN_IF_ERROR(Count(slice));
    if (Write(slice)) {
      written_.push_back(slice.index);
    } else {
      kept_.push_back(slice);
    }
  }
  return absl::OkStatus();
}

void GrpcShardCall::Commit(uint64_t build) {
  if (build_ != 0) reply_began_at_ = Now().time_since_epoch().count();  // Until now it was the push.
  if (build != build_) Forget();
  for (size_t i = 0; i < written_.size() && request_.on_slice; ++i) request_.on_slice(written_[i]);
  for (const ReceivedSlice& slice : std::exchange(kept_, {})) {
    if (Write(slice) && request_.on_slice) request_.on_slice(slice.index);
  }
}

void GrpcShardCall::Forget() {
  received_slices_.clear();
  written_.clear();
  kept_.clear();
  reply_.slices = 0;
}

absl::Status GrpcShardCall::TakeSlices(const std::vector<ReceivedSlice>& slices) {
  for (const ReceivedSlice& slice : slices) {
    PS_RETURN_IF_ERROR(Count(slice));
    if (Write(slice) && request_.on_slice) request_.on_slice(slice.index);
  }
  return absl::OkStatus();
}

// Whether it is a slice of this shard: whole, or a part where this side has the rest.
bool GrpcShardCall::Fits(const ReceivedSlice& slice) const {
  const auto& all = target_.plan.slices();
  const Payload& payload = slice.payload;
  if (slice.index >= all.size() || all[slice.index].shard != target_.shard) return false;
  const auto elements = static_cast<size_t>(all[slice.index].elements);
  if (payload.type() > WireType::kFloat16) return false;
  if (payload.absent()) return base_.has_value();
  if (payload.has_positions()) return base_.has_value() && payload.sparse()->positions.back() < elements;
  return payload.bytes() == elements * WireBytes(payload.type());
}

absl::Status GrpcShardCall::Count(const ReceivedSlice& slice) {
  if (!Fits(slice)) {
    return Internal("it sent slice ", slice.index, " with ", slice.payload.bytes(), " bytes, whose elements are ",
                    ToString(slice.payload.type()), ", which is not a slice of this shard or has the wrong size");
  }
  received_slices_.resize(target_.plan.slices().size());
  if (received_slices_[slice.index]) return Internal("it sent slice ", slice.index, " twice");
  received_slices_[slice.index] = true;
  ++reply_.slices;
  return absl::OkStatus();
}

bool GrpcShardCall::Write(const ReceivedSlice& slice) {
  const bool wanted = !request_.wants_slice || request_.wants_slice(slice.index);
  wrote_all_ = wrote_all_ && wanted;
  if (!wanted) return false;
  const SliceInfo& info = target_.plan.slices()[slice.index];
  const std::span<float> to =
      (*request_.in)[info.tensor].subspan(static_cast<size_t>(info.offset), static_cast<size_t>(info.elements));
  pulled_ != nullptr ? pulled_->Write(info, slice.payload, to) : slice.payload.CopyFloatsTo(to.data());
  return true;
}

void GrpcShardCall::OnDone(const grpc::Status& status) {
  const std::shared_ptr<GrpcShardCall> self = std::move(self_);
  if (!committed_) Forget();
  const bool pull = request_.kind == CallKind::kPull;
  const auto& expected =
      pull ? target_.plan.shard_slices(target_.shard) : target_.plan.pushed_shard_slices(target_.shard);
  if (pulled_ != nullptr && status.ok() && read_error_.ok() && wrote_all_ && reply_.slices == expected.size()) {
    pulled_->Complete(reply_.version, pull);
  }
  pulled_.reset();  // Before the next call of this shard begins.
  if (moved_at() != made_at_) reply_.moved_at = moved_at();
  reply_.first_reply_at = TimePoint(TimePoint::duration(reply_began_at_.load()));
  on_end_(read_error_.ok() ? FromServer(status, cancelled_) : read_error_, reply_);
}

class GrpcShardLink final : public ShardLink {
 public:
  explicit GrpcShardLink(Target target) : target_(std::move(target)) {}
  const std::string& address() const override { return target_.address; }
  std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) override {
    return std::make_shared<GrpcShardCall>(target_, std::move(request), std::move(on_end));
  }

 private:
  const Target target_;
};

}  // namespace

std::unique_ptr<ShardLink> MakeGrpcShardLink(std::shared_ptr<grpc::Channel> channel, std::string address,
                                             uint32_t shard, const SlicePlan& plan, v1::Identity id,
                                             const PushFormat& pushes) {
  const size_t message_bytes = MessageBytes(plan, shard, address, pushes);
  const Traffic::Link link = absl::StartsWith(address, "unix:") ? Traffic::Link::kUnix : Traffic::Link::kTcp;
  return std::make_unique<GrpcShardLink>(Target{.channel = std::move(channel),
                                                .address = std::move(address),
                                                .shard = shard,
                                                .plan = plan,
                                                .id = std::move(id),
                                                .message_bytes = message_bytes,
                                                .link = link});
}

}  // namespace ps
