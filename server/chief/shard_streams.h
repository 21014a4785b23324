// The chief's streams to its shards. Each goes on where it was when its connection breaks and the same process opens it
// again. A value: what is to be sent, it returns.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ps/v1/ps.pb.h"
#include "server/base/resumable_end.h"
#include "server/chief/chief_action.h"

namespace ps {

class ShardStreams {
 public:
  explicit ShardStreams(uint32_t num_shards) : streams_(num_shards) {}

  // Whether this is the process whose stream there was, and all that it has not received is still there.
  bool CanResume(const v1::Registration& registration) const;
  // A shard that registers gets all updates from now on by this connection, or what it has not received and then all
  // others.
  std::vector<ToShard> Open(uint64_t connection, const v1::Registration& registration);
  // This connection broke. Returns false if another has taken its place.
  bool Close(uint32_t shard, uint64_t connection);

  // A report came. Returns what is to be sent because of it, or nullopt if there is nothing new in it.
  std::optional<std::vector<ToShard>> Receive(uint32_t shard, const v1::ShardReport& report);
  // To every shard that is registered, or whose connection broke. A view is as MakeView makes it: who has the one
  // before gets what has changed, if it can read that, and others the whole one, to which `add_model` adds the model.
  std::vector<ToShard> Broadcast(
      v1::ChiefUpdate update, absl::FunctionRef<void(v1::View*)> add_model = [](v1::View*) {});

 private:
  struct Stream {
    uint64_t process = 0;     // 0: it cannot be resumed.
    uint64_t connection = 0;  // 0: none.
    bool takes_changes = false;
    bool has_view = false;  // The last one was sent on it.
    ResumableEnd<v1::ChiefUpdate> end;
  };

  std::vector<Stream> streams_;
  v1::View view_;  // The last one.
};

}  // namespace ps
