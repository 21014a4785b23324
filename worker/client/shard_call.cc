#include "worker/client/shard_call.h"

#include <grpcpp/channel.h>
#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"

namespace ps {
namespace {

// Payload of a message: what is ready, up to a full slice (tests/bench/TRIALS.md).
constexpr size_t kMessageBytes = kSliceElements * sizeof(float);

const char* MethodPath(ShardCall::Kind kind) {
  switch (kind) {
    case ShardCall::Kind::kInit:
      return "/ps.v1.Shard/Init";
    case ShardCall::Kind::kPush:
      return "/ps.v1.Shard/Push";
    case ShardCall::Kind::kPull:
      return "/ps.v1.Shard/Pull";
    case ShardCall::Kind::kPushPull:
      break;
  }
  return "/ps.v1.Shard/PushPull";
}

}  // namespace

ShardCall::ShardCall(Request request, EndFunction on_end)
    : request_(std::move(request)), on_end_(std::move(on_end)), moved_at_(Now().time_since_epoch().count()) {}

TimePoint ShardCall::Moved() {
  const TimePoint now = Now();
  moved_at_ = now.time_since_epoch().count();
  return now;
}

void ShardCall::Begin(const std::shared_ptr<grpc::Channel>& channel) {
  self_ = shared_from_this();
  stub_ = std::make_unique<grpc::GenericStub>(channel);
  context_.set_deadline(std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::system_clock::duration>(request_.timeout));
  // The server hears of a push with its first slice: it does not wait long for what a call is to bring.
  context_.set_initial_metadata_corked(sends_slices());
  stub_->PrepareBidiStreamingCall(&context_, MethodPath(request_.kind), {}, this);
  StartRead(&received_);
  {
    MutexLock lock(mutex_);
    begun_ = true;
    if (!sends_slices()) {
      writing_ = true;
      outgoing_ = EncodeMessage(request_.pull);
      StartWriteLast(&outgoing_, grpc::WriteOptions());
    } else {
      AddHold();
      held_ = true;
      WriteNext();
    }
  }
  StartCall();
}

void ShardCall::Send(const std::vector<uint32_t>& slices, bool last) {
  MutexLock lock(mutex_);
  if (begun_ && !held_) return;  // It failed, or all is sent.
  queue_.insert(queue_.end(), slices.begin(), slices.end());
  last_ = last_ || last;
  if (begun_ && !writing_) WriteNext();
}

void ShardCall::WriteNext() {
  if (queue_.empty() && !last_) return;
  writing_ = true;
  if (queue_.empty() && wrote_) {  // All was sent before it was known to be all.
    StartWritesDone();
    return ReleaseHold();
  }
  outgoing_ = NextMessage();
  wrote_ = true;
  if (queue_.empty() && last_) {
    StartWriteLast(&outgoing_, grpc::WriteOptions());
    ReleaseHold();
  } else {
    StartWrite(&outgoing_);
  }
}

grpc::ByteBuffer ShardCall::NextMessage() {
  std::vector<OutgoingSlice> slices;
  size_t bytes = 0;
  while (!queue_.empty()) {
    const SliceInfo& info = request_.plan->slices()[queue_.front()];
    if (bytes > 0 && bytes + static_cast<size_t>(info.bytes()) > kMessageBytes) break;
    bytes += static_cast<size_t>(info.bytes());
    slices.push_back({.index = info.index,
                      .values = (*request_.out)[info.tensor].subspan(static_cast<size_t>(info.offset),
                                                                     static_cast<size_t>(info.elements)),
                      // Not the call: gRPC keeps what it has not sent for as long as the call lives.
                      .release = [hold = request_.hold] {}});
    queue_.pop_front();
  }
  if (request_.kind != Kind::kInit) return EncodeSlices(request_.push, std::move(slices));
  v1::InitRequest header;
  *header.mutable_id() = request_.push.id();
  return EncodeSlices(header, std::move(slices));
}

void ShardCall::ReleaseHold() {
  if (std::exchange(held_, false)) RemoveHold();
}

void ShardCall::OnWriteDone(bool ok) {
  MutexLock lock(mutex_);
  writing_ = false;
  outgoing_.Clear();
  if (!ok) {
    queue_.clear();
    ReleaseHold();
  } else {
    reply_.written_at = Moved();
    if (held_) WriteNext();
  }
}

void ShardCall::OnReadDone(bool ok) {
  if (!ok) {
    MutexLock lock(mutex_);
    ReleaseHold();  // The server has ended the call.
    return;
  }
  reply_.read_at = Moved();
  if (reply_.first_reply_at == TimePoint()) reply_.first_reply_at = reply_.read_at;
  if (read_error_.ok()) {
    read_error_ = OnMessage();
    if (!read_error_.ok()) context_.TryCancel();
  }
  received_.Clear();
  StartRead(&received_);
}

absl::Status ShardCall::OnMessage() {
  if (request_.kind == Kind::kInit) return absl::OkStatus();
  v1::PullReply pull;
  if (request_.kind == Kind::kPush) {
    PS_RETURN_IF_ERROR(DecodeMessage(received_, pull.mutable_push()));
  } else {
    const absl::StatusOr<std::vector<ReceivedSlice>> slices = DecodeSlices(received_, &pull);
    if (!slices.ok()) return slices.status();
    PS_RETURN_IF_ERROR(TakeSlices(*slices));
    reply_.version = pull.version();
    reply_.waited_us += pull.waited_us();
  }
  if (!pull.has_push()) return absl::OkStatus();
  reply_.answer = static_cast<PushAnswer>(pull.push().answer());
  reply_.generation = pull.push().generation();
  if (request_.kind == Kind::kPush) {
    reply_.waited_us = pull.push().waited_us();
    reply_.version = pull.push().version();
  }
  return absl::OkStatus();
}

absl::Status ShardCall::TakeSlices(const std::vector<ReceivedSlice>& slices) {
  for (const ReceivedSlice& slice : slices) {
    const auto& all = request_.plan->slices();
    if (slice.index >= all.size() || all[slice.index].shard != request_.shard ||
        slice.payload.bytes() != static_cast<size_t>(all[slice.index].bytes())) {
      return absl::InternalError(absl::StrCat("shard ", request_.shard, " sent slice ", slice.index, " with ",
                                              slice.payload.bytes(),
                                              " bytes, which is not a slice of this shard or has the wrong size"));
    }
    ++reply_.slices;
    if (request_.wants_slice && !request_.wants_slice(slice.index)) continue;
    const SliceInfo& info = all[slice.index];
    slice.payload.CopyTo((*request_.in)[info.tensor].data() + info.offset);
    if (request_.on_slice) request_.on_slice(slice.index);
  }
  return absl::OkStatus();
}

void ShardCall::OnDone(const grpc::Status& status) {
  absl::Status end = read_error_.ok() ? FromGrpc(status) : read_error_;
  const bool pulls = request_.kind == Kind::kPull || request_.kind == Kind::kPushPull;
  if (end.ok() && pulls && reply_.answer != PushAnswer::kFenced &&
      reply_.slices != request_.plan->shard_slices(request_.shard).size()) {
    end = absl::InternalError(absl::StrCat("shard ", request_.shard, " sent ", reply_.slices, " of its slices"));
  }
  const std::shared_ptr<ShardCall> self = std::move(self_);
  on_end_(end, reply_);
}

}  // namespace ps
