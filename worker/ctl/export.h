// ps_ctl export: a whole model's weights in one safetensors file, under the model's own names.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ps/v1/ps.pb.h"
#include "worker/link/pull_weights.h"

namespace ps {

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
