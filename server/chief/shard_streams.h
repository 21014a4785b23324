// The chief's streams to its shards. Each goes on where it was when its connection breaks and the same process opens it
// again. Not thread-safe; what is sent goes through an outbox.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/outbox.h"
#include "ps/v1/ps.pb.h"
#include "server/base/resumable_end.h"

namespace ps {

class ShardStreams {
 public:
  using SendFunction = std::function<void(const v1::ChiefUpdate&)>;

  ShardStreams(uint32_t num_shards, CallOutbox& outbox) : outbox_(outbox), streams_(num_shards) {}

  // Whether this is the process whose stream there was, and all that it has not received is still there.
  bool CanResume(const v1::Registration& registration) const;
  // A shard that registers gets all updates from now on, or what it has not received and then all others. Returns a
  // number for Close.
  uint64_t Open(const v1::Registration& registration, SendFunction send);
  // This connection broke. Returns false if another has taken its place.
  bool Close(uint32_t shard, uint64_t connection);

  // A report came. Returns false if there is nothing new in it.
  bool Receive(uint32_t shard, const v1::ShardReport& report);
  // To every shard that is registered, or whose connection broke. A view is whole; who has the one before gets what has
  // changed, if it can read that.
  void Broadcast(v1::ChiefUpdate update);

 private:
  struct Stream {
    uint64_t process = 0;     // 0: it cannot be resumed.
    uint64_t connection = 0;  // 0: none.
    SendFunction send;
    bool takes_changes = false;
    bool has_view = false;  // The last one was sent on it.
    ResumableEnd<v1::ChiefUpdate> end;
  };

  void Send(const Stream& stream, v1::ChiefUpdate update);

  CallOutbox& outbox_;
  std::vector<Stream> streams_;
  v1::View view_;  // The last one.
  uint64_t last_connection_ = 0;
};

}  // namespace ps
