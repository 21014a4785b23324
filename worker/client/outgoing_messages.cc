#include "worker/client/outgoing_messages.h"

#include <algorithm>
#include <utility>

#include "common/endpoint.h"
#include "common/local/model_memory.h"
#include "common/this_host.h"
#include "worker/client/call_messages.h"

namespace ps {
namespace {

// Payload of a message: what is ready, up to a limit. A server builds from whole messages, and answers with what it has
// built while others are on their way: so to other hosts a message is a small part of what a call sends, but no smaller
// than a slice, or some that are small (tests/bench/TRIALS.md).
constexpr int64_t kLeastMessages = 64;
constexpr int64_t kLeastMessageBytes = 16 << 10;  // Of slices that are smaller, some.

// What a message says of each slice is bounded by servers, too (64 KiB).
constexpr size_t kMessageSlices = 4096;

}  // namespace

size_t MessageBytes(const SlicePlan& plan, uint32_t shard, const std::string& address, const PushFormat& pushes) {
  if (IsThisHost(address)) return kMostMessageSliceBytes;
  const ModelMemory memory(plan.layout(), pushes);
  int64_t bytes = 0;
  for (const uint32_t slice : plan.pushed_shard_slices(shard)) {
    const ModelMemory::Place place = memory.slice(plan.slices()[slice]);
    bytes += static_cast<int64_t>(place.positions + place.values);
  }
  return static_cast<size_t>(std::clamp(bytes / kLeastMessages, kLeastMessageBytes, kMostMessageSliceBytes));
}

v1::PushRequest OutgoingMessages::PushHeader() const {
  v1::PushRequest header = PushHeaderOf(request_);
  *header.mutable_id() = id_;
  header.set_stream(request_.stream);
  if (base_.has_value()) header.set_base(*base_);
  return header;
}

grpc::ByteBuffer OutgoingMessages::Pull() const {
  v1::PullRequest pull = PullHeaderOf(request_);
  *pull.mutable_id() = id_;
  if (base_.has_value()) pull.set_base(*base_);
  return EncodeMessage(pull);
}

OutgoingSlice OutgoingMessages::SliceOf(const SliceInfo& info) const {
  // Not the call: gRPC keeps what it has not sent for as long as the call lives.
  OutgoingSlice slice = {.index = info.index, .values = {}, .release = [memory = request_.memory_in_use] {}};
  if (request_.encoded == nullptr) {
    slice.values = BytesOf(
        (*request_.out)[info.tensor].subspan(static_cast<size_t>(info.offset), static_cast<size_t>(info.elements)));
    return slice;
  }
  const ModelMemory::Place place = request_.encoded->model().slice(info);
  const Piece bytes = Piece(request_.encoded->bytes()).subspan(place.begin, place.positions + place.values);
  slice.type = place.type;
  slice.positions = bytes.first(place.positions);
  slice.values = bytes.subspan(place.positions);
  return slice;
}

grpc::ByteBuffer OutgoingMessages::Next() {
  std::vector<OutgoingSlice> slices;
  size_t bytes = 0;
  while (!queue_.empty() && slices.size() < kMessageSlices) {
    const SliceInfo& info = plan_.slices()[queue_.front()];
    if (request_.absent(info)) {
      slices.push_back({.index = info.index, .values = {}, .release = {}, .absent = true});
      queue_.pop_front();
      continue;
    }
    OutgoingSlice slice = SliceOf(info);
    const size_t slice_bytes = slice.values.size() + slice.positions.size();
    if (bytes > 0 && bytes + slice_bytes > message_bytes_) break;
    bytes += slice_bytes;
    slices.push_back(std::move(slice));
    queue_.pop_front();
  }
  if (request_.kind != CallKind::kInit) return EncodeSlices(PushHeader(), std::move(slices));
  v1::InitRequest header;
  *header.mutable_id() = id_;
  return EncodeSlices(header, std::move(slices));
}

}  // namespace ps
