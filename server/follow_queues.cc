#include "server/follow_queues.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/codec.h"

namespace ps {

absl::Status UpdateQueue::Add(const v1::ChiefUpdate& update) {
  grpc::ByteBuffer encoded = EncodeMessage(update);
  const size_t bytes = encoded.Length();
  if (!updates_.empty() && (updates_.size() >= limits_.updates || bytes_ + bytes > limits_.bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("the shard does not read the chief's updates: ", updates_.size(),
                                                     " of ", bytes_, " bytes wait for it, the limit"));
  }
  bytes_ += bytes;
  updates_.push_back(std::move(encoded));
  return absl::OkStatus();
}

std::optional<grpc::ByteBuffer> UpdateQueue::Take() {
  if (updates_.empty()) return std::nullopt;
  grpc::ByteBuffer update;
  update.Swap(&updates_.front());
  updates_.pop_front();
  bytes_ -= update.Length();
  return update;
}

absl::Status ReportQueue::Add(const v1::ShardReport& report) {
  Check(!report.has_registration(), "a registration is the first report of its stream, and nothing is merged into it");
  if (!waiting_.has_value()) waiting_ = v1::ShardReport();
  const size_t pushes = static_cast<size_t>(waiting_->complete_size()) + static_cast<size_t>(report.complete_size());
  if (pushes > kMaxPushes || norms_.size() + static_cast<size_t>(report.norms_size()) > kMaxPushes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the chief does not read this shard's reports: ", waiting_->complete_size(),
                     " complete pushes and the norms of ", norms_.size(), " wait for it, the limit"));
  }
  norms_.insert(norms_.end(), report.norms().begin(), report.norms().end());
  v1::ShardReport earlier = std::exchange(*waiting_, report);
  earlier.mutable_complete()->MergeFrom(report.complete());
  waiting_->mutable_complete()->Swap(earlier.mutable_complete());
  waiting_->clear_norms();
  if (!earlier.failure().empty()) {
    waiting_->set_failure(earlier.failure());
    waiting_->set_not_finite(earlier.not_finite());
  }
  if (!earlier.restore_failure().empty()) waiting_->set_restore_failure(earlier.restore_failure());
  // What came of an earlier checkpoint, of which a disk was slow to tell, is of no use any more.
  const bool later = earlier.checkpoint().number() > waiting_->checkpoint().number();
  if (later) waiting_->mutable_checkpoint()->Swap(earlier.mutable_checkpoint());
  // The last one that says anything of a cut: one phase begins when the one before is reported.
  if (!waiting_->has_cut() && earlier.has_cut()) *waiting_->mutable_cut() = std::move(*earlier.mutable_cut());
  return absl::OkStatus();
}

std::optional<v1::ShardReport> ReportQueue::Take() {
  if (!waiting_.has_value()) return std::nullopt;
  v1::ShardReport report = *waiting_;
  size_t bytes = 0;
  while (!norms_.empty()) {
    bytes += norms_.front().ByteSizeLong();
    if (report.norms_size() > 0 && bytes > kMaxNormBytes) break;
    *report.add_norms() = std::move(norms_.front());
    norms_.pop_front();
  }
  if (norms_.empty()) {
    waiting_.reset();
  } else {
    waiting_->clear_complete();
    waiting_->clear_failure();
    waiting_->clear_cut();
    waiting_->clear_checkpoint();
    waiting_->clear_restore_failure();
  }
  return report;
}

}  // namespace ps
