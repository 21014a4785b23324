#include "server/follow_call.h"

#include "common/codec.h"
#include "common/status.h"

namespace ps {

absl::Status FollowCall::OnMessage(const grpc::ByteBuffer& message) {
  v1::ShardReport report;
  PS_RETURN_IF_ERROR(DecodeMessage(message, &report));
  if (report.has_registration()) {
    PS_RETURN_IF_ERROR(Register(report));
  } else if (!shard_.has_value()) {
    return absl::InvalidArgumentError("a shard's first report must register it");
  } else {
    chief_.OnReport(*shard_, report, Now());
  }
  ReadWhenever(kMaxReportBytes);
  return absl::OkStatus();
}

absl::Status FollowCall::Register(const v1::ShardReport& report) {
  if (shard_.has_value()) return absl::InvalidArgumentError("the shard is already registered");
  const absl::StatusOr<uint64_t> registered = chief_.RegisterShard(
      report.registration(), [self = Self(this)](const v1::ChiefUpdate& update) { self->Send(update); }, Now());
  if (!registered.ok()) return registered.status();
  connection_ = *registered;
  shard_ = report.registration().shard();
  watch().Adopt(this);  // The chief takes one a shard.
  return absl::OkStatus();
}

void FollowCall::OnOver() {
  if (shard_.has_value()) chief_.OnShardGone(*shard_, connection_, Now());
}

void FollowCall::Send(const v1::ChiefUpdate& update) {
  absl::Status added = absl::OkStatus();
  {
    MutexLock lock(mutex_);
    added = queue_.Add(update);
    WriteNext();
  }
  if (!added.ok()) End(added);
}

void FollowCall::OnWritten() {
  MutexLock lock(mutex_);
  writing_ = false;
  WriteNext();
}

void FollowCall::WriteNext() {
  if (writing_) return;
  const std::optional<grpc::ByteBuffer> next = queue_.Take();
  if (!next.has_value()) return;
  writing_ = true;
  Write(*next);
}

}  // namespace ps
