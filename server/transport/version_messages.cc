#include "server/transport/version_messages.h"

#include <cstring>
#include <memory>
#include <utility>

#include "common/endpoint.h"

namespace ps {
namespace {

// Elements of a slice, beside each other.
struct ChangedElements {
  ChangedElements(std::vector<uint16_t> of, Piece whole, size_t width)
      : positions(std::move(of)), values(positions.size() * width) {
    for (size_t i = 0; i < positions.size(); ++i) {
      std::memcpy(values.data() + i * width, whole.data() + positions[i] * width, width);
    }
  }
  Piece position_bytes() const {
    return {reinterpret_cast<const uint8_t*>(positions.data()), positions.size() * sizeof(uint16_t)};
  }

  const std::vector<uint16_t> positions;
  std::vector<uint8_t> values;
};

}  // namespace

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
  wanted_ = std::move(wanted);
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
    const bool carried = wanted_.carries.empty() || Contain(wanted_.carries, layout.slice(local).index);
    const bool wanted = carried && (wanted_.constants || layout.is_pushed(local));
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
    OutgoingSlice slice = SliceOf(local);
    const size_t slice_bytes = slice.values.size() + slice.positions.size();
    if (bytes > 0 && bytes + slice_bytes > kMostMessageSliceBytes) break;
    bytes += slice_bytes;
    slices.push_back(std::move(slice));
    sent_.resize(weights_->layout().slices());
    sent_[local] = true;
  }
  return EncodeSlices(header, std::move(slices));
}

OutgoingSlice VersionMessages::SliceOf(size_t local) const {
  const uint32_t index = weights_->layout().slice(local).index;
  if (wanted_.float32) {
    return {.index = index, .values = BytesOf(weights_->slice(local)), .release = [pin = *weights_] {}};
  }
  const VersionPin::Sent whole = weights_->sent(local);
  std::optional<std::vector<uint16_t>> changed;
  if (wanted_.base.has_value()) changed = weights_->changed(*wanted_.base, local);
  const size_t width = WireBytes(whole.type);
  if (!changed.has_value() || changed->size() * (width + sizeof(uint16_t)) >= whole.bytes.size()) {
    return {.index = index, .values = whole.bytes, .type = whole.type, .release = [pin = *weights_] {}};
  }
  if (changed->empty()) return {.index = index, .values = {}, .release = {}, .absent = true};
  const auto some = std::make_shared<ChangedElements>(*std::move(changed), whole.bytes, width);
  return {.index = index,
          .values = some->values,
          .type = whole.type,
          .positions = some->position_bytes(),
          .release = [some] {}};
}

}  // namespace ps
