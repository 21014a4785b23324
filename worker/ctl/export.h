// ps_ctl export: a whole model's weights in one safetensors file, under the model's own names.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
#include "common/slices.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"

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

// Both write the file whole or not at all, with the version as its metadata, and return a line that says what is in it.
// In memory there is the model once. Errors name the file, the folder or the shard.

// Exports the weights of the checkpoint in this folder, or of the newest complete one in a folder of checkpoints.
absl::StatusOr<std::string> ExportCheckpoint(const std::string& checkpoint, const std::string& output);

// Exports the weights of a running job at this version, or at the newest, which is one for all shards where the job is
// synchronous. `status` is the chief's, with the layout; `served` are the servers that it names. Shards are waited for
// as PullWeights does.
absl::StatusOr<std::string> ExportJob(const v1::StatusReply& status, const ServedModel& served,
                                      std::optional<uint64_t> version, std::chrono::nanoseconds timeout,
                                      const std::string& output);

}  // namespace ps
