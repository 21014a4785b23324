// Values of flags that more than one part of a server reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include <google/protobuf/map.h>
#include "absl/status/statusor.h"

namespace ps {

// Where the settings of another (a worker, a shard) differ: "--seed=2 (the job has 1), …"; `who_has` is "the job has".
std::string DifferentSettings(const std::map<std::string, std::string>& ours,
                              const google::protobuf::Map<std::string, std::string>& theirs,
                              const std::string& who_has);

// How often a checkpoint is taken: after so many versions, or after a time.
struct CheckpointEvery {
  uint64_t versions = 0;  // 0: by time.
  std::chrono::nanoseconds time{0};
};
// "100" or "30s". INVALID_ARGUMENT, naming --checkpoint_every.
absl::StatusOr<CheckpointEvery> ParseCheckpointEvery(const std::string& text);

}  // namespace ps
