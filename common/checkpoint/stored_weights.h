// The weights of a checkpoint, for whoever wants no more than those.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"

namespace ps {

struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

// A checkpoint's own folder, or a folder of checkpoints (CheckpointDir), of which it is the newest complete one whose
// manifest can be read; those that are skipped are logged. NOT_FOUND: the folder is neither. INVALID_ARGUMENT, naming
// the file: no manifest can be read. UNIMPLEMENTED: a later version of this program has written the newest one.
absl::StatusOr<StoredCheckpoint> FindCheckpoint(const std::string& path);

// Of these tensors of the manifest's layout, each of which is there once. The errors of ReadParts; RESOURCE_EXHAUSTED:
// there is not enough memory.
absl::StatusOr<std::vector<std::vector<float>>> ReadStoredWeights(const StoredCheckpoint& checkpoint,
                                                                  const std::vector<uint32_t>& tensors);

}  // namespace ps
