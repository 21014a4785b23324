// What a call has to send of a version, cut into messages (PullReply): slices of a version in the making as they come,
// then the answer, which says which build counts, and the slices that are still missing.
//
// Not thread-safe: the call locks. It holds weights as long as slices of them are to be sent; what was encoded holds
// them itself until gRPC has let go of it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <vector>

#include <grpcpp/support/byte_buffer.h>
#include "common/codec.h"
#include "common/slices.h"
#include "ps/v1/ps.pb.h"
#include "server/engine/parameters.h"
#include "server/shard/build_streams.h"

namespace ps {

class VersionMessages {
 public:
  // More slices of a build may be sent, or none of it any more.
  void Add(BuiltSlices built);
  // The answer, once. Without weights there is nothing else to send.
  struct Wanted {
    bool constants = false;        // Their slices, too.
    bool float32 = false;          // Weights are sent as the server keeps them.
    std::optional<uint64_t> base;  // The meaning is that of PullRequest.base.
    SliceRanges carries;           // It asks for these slices; empty: for all.
  };
  void Answer(v1::PullReply header, std::optional<VersionPin> weights, Wanted wanted);

  struct Message {
    grpc::ByteBuffer bytes;
    bool last = false;
  };
  // What is to be sent now, if anything is.
  std::optional<Message> Next();

 private:
  // The next of the weights that are held; those of lower index, so of earlier layers, come first.
  grpc::ByteBuffer NextSlices(const v1::PullReply& header);
  OutgoingSlice SliceOf(size_t local) const;
  void QueueMissing();

  std::optional<VersionPin> weights_;
  uint64_t build_ = 0;      // Slices were sent of this one last; 0: of none.
  std::vector<bool> sent_;  // Its slices that were sent, by local index; empty: none.
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> queue_;  // Local indices.
  std::optional<v1::PullReply> answer_;                                     // Until it was sent.
  bool answered_ = false;
  Wanted wanted_;
};

}  // namespace ps
