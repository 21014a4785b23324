// The weights hash of a job, from its shards' hashes of their slices.
#pragma once

#include <memory>
#include <stop_token>
#include <vector>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"

namespace ps {

struct HashJob {
  std::vector<std::shared_ptr<grpc::Channel>> channels;  // By shard.
  size_t slices = 0;                                     // The whole model's.
  bool one_version = false;                              // All shards must be at the same version.
  v1::Identity id;                                       // A member's identity; it may be empty.
};

// Asks all shards at once. Where one_version is set and the job moves on meanwhile, it asks all for a version that is
// still to come, further ahead each time. Transient errors are retried until the deadline. The error names the shard.
absl::StatusOr<HashedWeights> HashWeights(const HashJob& job, TimePoint deadline, const std::stop_token& stop);

}  // namespace ps
