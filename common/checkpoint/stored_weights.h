// The weights of a checkpoint, for whoever wants no more than those.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"

namespace ps {

struct StoredCheckpoint {
  std::string folder;
  Manifest manifest;
};

struct StoredWeights {
  StoredCheckpoint checkpoint;
  std::vector<std::vector<float>> values;  // Of the tensors that were chosen.
};

// The tensors that are wanted of a checkpoint, by their numbers in its layout, each once.
using ChooseTensors = std::function<absl::StatusOr<std::vector<uint32_t>>(const StoredCheckpoint&)>;

// `path` is a checkpoint's own folder, or a folder of checkpoints (CheckpointDir), of which the newest complete one is
// taken that can be read; those that are skipped are logged by their names. NOT_FOUND: the folder is neither. The
// errors of `choose`. INVALID_ARGUMENT or NOT_FOUND, naming the files: all are damaged. UNIMPLEMENTED: a later version
// of this program has written the newest one. RESOURCE_EXHAUSTED: there is not enough memory.
absl::StatusOr<StoredWeights> ReadStoredWeights(const std::string& path, const ChooseTensors& choose);

}  // namespace ps
