// The links of a member to all shards of its job, as the chief's answer to its join names them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
#include "common/slices.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"
#include "worker/link/shard_link.h"

namespace ps {

struct ShardLinks {
  // By shard. None is the chief's: heartbeats must not wait behind weights, which take seconds on a slow link.
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  std::vector<std::unique_ptr<ShardLink>> links;  // By shard.
  bool has_shared_memory = false;                 // To one shard at least.
  std::string text;                               // Which are through what, and why, for the user.
};

// The plan must outlive the links. `make_spare`: whether there is memory to be shared.
// The error is that of --shared_memory=require.
absl::StatusOr<ShardLinks> LinkShards(const ClientOptions& options, const v1::JoinReply& joined, const SlicePlan& plan,
                                      const std::function<absl::Status()>& make_spare);

}  // namespace ps
