// The link to a shard on the same host, through shared memory. What is said is in proto/ps/v1/local.proto.
//
// It makes the calls that send nothing, and those whose slices lie in shared memory (CallRequest.shared). The server is
// of the same user, but what it says is checked all the same.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/slices.h"
#include "ps/v1/ps.pb.h"
#include "worker/client/shard_link.h"

namespace ps {

struct LocalTarget {
  std::string socket;   // ShardInfo.local_socket.
  std::string address;  // For messages.
  uint32_t shard = 0;
  const SlicePlan* plan = nullptr;  // Outlives the link.
  v1::Identity id;
  std::function<void(const std::string&)> on_lost;  // Called once, from a thread of the link, if it ends by itself.
};

// Connects, and is let in. The error says why there is no shared memory: UNAVAILABLE if nobody is there on this host.
absl::StatusOr<std::unique_ptr<ShardLink>> ConnectLocally(const LocalTarget& target, TimePoint deadline);

}  // namespace ps
