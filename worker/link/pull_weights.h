// A whole model's weights for whoever is no member of the job: ps_ctl export, and Observer (ps/observer.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
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

struct PullTimes {
  std::chrono::nanoseconds timeout;  // Transient errors are retried for so long.
  std::chrono::nanoseconds silence;  // A shard that sends nothing for longer is given up.
  std::stop_token stop = {};
};

// Pulls this version of all shards, or the newest, into `weights`, a block for each tensor of the plan's layout, and
// returns the version of each shard. Where one_version is set and the job moves on meanwhile, it asks all for a version
// that is still to come, further ahead each time. CANCELLED once a stop is requested. Errors name the shard; then what
// is in `weights` is worth nothing.
absl::StatusOr<std::vector<uint64_t>> PullWeights(const ServedModel& model, const SlicePlan& plan,
                                                  std::optional<uint64_t> version, const PullTimes& times,
                                                  const MutableTensors& weights);

// Whether another attempt may end differently.
bool IsTransient(const absl::Status& status);

}  // namespace ps
