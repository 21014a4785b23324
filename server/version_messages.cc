#include "server/version_messages.h"

#include <utility>

#include "common/codec.h"
#include "common/endpoint.h"

namespace ps {

void VersionMessages::Add(BuiltSlices built) {
  if (answered_) return;
  if (built.build != build_) sent_.clear();
  if (built.build != build_ || !built.weights.has_value()) queue_ = {};
  build_ = built.build;
  weights_ = std::move(built.weights);
  for (const size_t local : built.slices) queue_.push(local);
}

void VersionMessages::Answer(v1::PullReply header, std::optional<VersionPin> weights, Wanted wanted) {
  answered_ = true;
  wanted_ = wanted;
  answer_ = std::move(header);
  weights_ = std::move(weights);
  queue_ = {};
  if (weights_.has_value()) QueueMissing();
}

void VersionMessages::QueueMissing() {
  if (weights_->build() != build_) sent_.clear();
  if (!sent_.empty()) answer_->set_build(build_);
  const ShardLayout& layout = weights_->layout();
  for (size_t local = 0; local < layout.slices(); ++local) {
    const bool wanted = wanted_.constants || layout.is_pushed(local);
    if (wanted && (sent_.empty() || !sent_[local])) queue_.push(local);
  }
}

std::optional<VersionMessages::Message> VersionMessages::Next() {
  Message message;
  if (answer_.has_value()) {
    // What was sent before it is complete with this; when it came is told by a message of its own.
    const v1::PullReply header = *std::exchange(answer_, std::nullopt);
    message.bytes = header.build() > 0 ? EncodeMessage(header) : NextSlices(header);
  } else if (!queue_.empty()) {
    v1::PullReply header;
    answered_ ? header.set_version(weights_->version()) : header.set_build(build_);
    message.bytes = NextSlices(header);
  } else {
    return std::nullopt;
  }
  message.last = answered_ && queue_.empty();
  if (queue_.empty()) weights_.reset();
  return message;
}

grpc::ByteBuffer VersionMessages::NextSlices(const v1::PullReply& header) {
  std::vector<OutgoingSlice> slices;
  size_t bytes = 0;
  for (; !queue_.empty(); queue_.pop()) {
    const size_t local = queue_.top();
    const SliceInfo& info = weights_->layout().slice(local);
    const VersionPin::Sent sent =
        wanted_.float32 ? VersionPin::Sent{.bytes = BytesOf(weights_->slice(local))} : weights_->sent(local);
    if (bytes > 0 && bytes + sent.bytes.size() > kMostMessageSliceBytes) break;
    bytes += sent.bytes.size();
    slices.push_back({.index = info.index, .values = sent.bytes, .type = sent.type, .release = [pin = *weights_] {}});
    sent_.resize(weights_->layout().slices());
    sent_[local] = true;
  }
  return EncodeSlices(header, std::move(slices));
}

}  // namespace ps
