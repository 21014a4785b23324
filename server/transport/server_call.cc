#include "server/transport/server_call.h"

#include <utility>

#include "common/check.h"
#include "common/grpc_call.h"
#include "common/status.h"

namespace ps {

absl::Status ServerCall::Begin() {
  PS_RETURN_IF_ERROR(watch_.Add(this, context_.peer(), [this] { context_.TryCancel(); }));
  Hold();
  OnBegin();
  return absl::OkStatus();
}

void ServerCall::StartReading(size_t max_bytes, bool in_time) {
  MutexLock lock(mutex_);
  if (ended_) return;
  max_bytes_ = max_bytes;
  in_time ? watch_.Receiving(this, max_bytes, Now()) : watch_.Received(this);
  StartRead(&incoming_);
}

void ServerCall::OnReadDone(bool ok) {
  watch_.Received(this);
  if (!ok) return OnMessagesEnd();
  watch_.counts().AddReceived(link_, incoming_.Length());
  if (incoming_.Length() > max_bytes_) {
    return End(InvalidArgument("a request of ", incoming_.Length(), " bytes; at most ", max_bytes_, " are allowed"));
  }
  // Kept until its reaction returns; the next one may be read meanwhile.
  grpc::ByteBuffer message;
  message.Swap(&incoming_);
  const absl::Status status = OnMessage(message);
  if (!status.ok()) End(status);
}

void ServerCall::Write(const grpc::ByteBuffer& message) {
  MutexLock lock(mutex_);
  if (ended_) return;
  Check(!writing_, "a call writes one message at a time");
  writing_ = true;
  outgoing_ = message;
  watch_.counts().AddSent(link_, outgoing_.Length());
  watch_.Sending(this, outgoing_.Length(), Now());
  StartWrite(&outgoing_);
}

void ServerCall::OnWriteDone(bool ok) {
  if (!ok) {
    gone_ = true;  // What is still being read ends, too, and is not all that there is.
    return End(absl::CancelledError("the caller disconnected"));
  }
  grpc::ByteBuffer written;  // It may hold a version, and the call may go on for long.
  {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ended_) watch_.Sent(this);
    if (!ended_) written.Swap(&outgoing_);
  }
  written.Clear();
  OnWritten();
}

void ServerCall::Answer(const grpc::ByteBuffer& message) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
    Check(!writing_, "a call writes one message at a time");
    outgoing_ = message;
    watch_.counts().AddSent(link_, outgoing_.Length());
    watch_.Ending(this, outgoing_.Length(), Now());
  }
  // The call's own memory until OnDone.
  StartWriteAndFinish(&outgoing_, grpc::WriteOptions(), grpc::Status::OK);
}

void ServerCall::End(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
    watch_.counts().AddEnded(status);
    watch_.Ending(this, 0, Now());
  }
  Finish(ToGrpc(status));
}

void ServerCall::OnCancel() {
  gone_ = true;
  OnGone();
  End(absl::CancelledError("the caller disconnected"));
}

void ServerCall::OnDone() {
  watch_.Remove(this);  // From here on it is not cancelled any more, so the context may go.
  OnOver();
  Release();
}

}  // namespace ps
