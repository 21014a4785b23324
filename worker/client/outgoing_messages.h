// What a call over gRPC sends: its request, or its slices as messages of some size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include "common/codec.h"
#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/v1/ps.pb.h"
#include "worker/client/shard_link.h"

namespace ps {

// How many bytes of slices a message of a push to this shard has at most, unless one slice is larger.
size_t MessageBytes(const SlicePlan& plan, uint32_t shard, const std::string& address, const PushFormat& pushes);

// Not thread-safe, but for Pull.
class OutgoingMessages {
 public:
  // `base`: the version of which this side has all weights. What is given must outlive it.
  OutgoingMessages(const SlicePlan& plan, const v1::Identity& id, const CallRequest& request,
                   std::optional<uint64_t> base, size_t message_bytes)
      : plan_(plan), id_(id), request_(request), base_(base), message_bytes_(message_bytes) {}

  // The whole of what a pull sends.
  grpc::ByteBuffer Pull() const;

  // These slices may be sent.
  void Add(const std::vector<uint32_t>& slices) { queue_.insert(queue_.end(), slices.begin(), slices.end()); }
  bool empty() const { return queue_.empty(); }
  void Clear() { queue_.clear(); }
  // Of a push, or of initial values: the next message, with as many of them as it takes; perhaps none. It refers to
  // memory of the request, which it holds (memory_in_use).
  grpc::ByteBuffer Next();

 private:
  v1::PushRequest PushHeader() const;
  OutgoingSlice SliceOf(const SliceInfo& info) const;

  const SlicePlan& plan_;
  const v1::Identity& id_;
  const CallRequest& request_;
  const std::optional<uint64_t> base_;
  const size_t message_bytes_;
  std::deque<uint32_t> queue_;
};

}  // namespace ps
