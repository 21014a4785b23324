// What a call asks and is answered, as messages: the same on every transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include "absl/status/status.h"
#include "common/codec.h"
#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/v1/ps.pb.h"
#include "worker/link/residuals.h"
#include "worker/link/shard_link.h"
#include "worker/link/tensor_memory.h"

namespace ps {

// Without an identity and without slices.
v1::PushRequest PushHeaderOf(const CallRequest& request);
v1::PullRequest PullHeaderOf(const CallRequest& request);

// Adds what the message says to the reply. Of a call that only pushes the version is the push's; of another, the
// weights'. INVALID_ARGUMENT for what this client does not understand.
void TakePush(const v1::PushReply& push, bool only, ShardReply* reply);
absl::Status TakePull(const v1::PullReply& pull, ShardReply* reply);

// What a call over gRPC sends: its request, or its slices as messages of some size.

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
  // The bytes of slices, and of their state, in the messages so far.
  uint64_t payload_bytes() const { return payload_bytes_; }
  // The next message of a push, or of initial values, with as many of the slices as it takes; perhaps none. It refers
  // to memory of the request, which it holds (memory_in_use).
  grpc::ByteBuffer Next();

 private:
  v1::PushRequest PushHeader() const;
  OutgoingSlice SliceOf(const SliceInfo& info) const;
  // The bytes of the slice's initial state; 0: it has none.
  size_t StateBytes(const SliceInfo& info) const;
  void AddState(const SliceInfo& info, v1::InitRequest* header) const;

  const SlicePlan& plan_;
  const v1::Identity& id_;
  const CallRequest& request_;
  const std::optional<uint64_t> base_;
  const size_t message_bytes_;
  std::deque<uint32_t> queue_;
  uint64_t payload_bytes_ = 0;
};

// How a slice of a weight's gradient, or difference, becomes what a push sends of it, where that is not the floats as
// they are: rounded to two bytes or four bits, or the largest elements only, with what was left of earlier pushes.
// ps.proto says it for clients in other languages.

// Writes the slice, of which `values` are all elements, to its place in `to`. `residuals`, if any, keeps what is not
// sent; `momentum` is JoinReply.momentum_correction, and `decay` JoinReply.error_feedback_decay. False: a value is not
// finite, or is not once it is rounded; then what is written is no use. A value that only is too large with what is
// kept is not: as much as fits is sent of it.
bool EncodeSlice(const float* values, const SliceInfo& info, const SharedTensors& to, Residuals* residuals,
                 float momentum, float decay);

}  // namespace ps
