// The weights of a running job, for a reader who is not one of its workers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/slices.h"
#include "ps/client.h"

namespace ps {

struct ServedModel {
  struct Server {
    std::shared_ptr<grpc::Channel> channel;
    std::string address;
  };
  std::vector<Server> shards;  // By number.
  bool one_version = false;    // All shards must be at the same version.
};

// Pulls this version of all shards, or the newest, into `weights`, a block for each tensor of the plan's layout, and
// returns the version of each shard. Where one_version is set and the job moves on meanwhile, it asks all for a version
// that is still to come, further ahead each time. Transient errors are retried for `timeout`, and a shard that sends
// nothing for so long is given up. Errors name the shard; then what is in `weights` is worth nothing.
absl::StatusOr<std::vector<uint64_t>> PullWeights(const ServedModel& model, const SlicePlan& plan,
                                                  std::optional<uint64_t> version, std::chrono::nanoseconds timeout,
                                                  const MutableTensors& weights);

}  // namespace ps
