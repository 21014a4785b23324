#include "common/checkpoint/stored_weights.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/status.h"

namespace ps {
namespace {

absl::StatusOr<StoredCheckpoint> Load(const std::string& folder) {
  absl::StatusOr<Manifest> manifest = ReadManifest(folder);
  if (!manifest.ok()) return manifest.status();
  return StoredCheckpoint{.folder = folder, .manifest = *std::move(manifest)};
}

// So that a layout of any size costs no memory before there are values for it.
absl::Status CheckSize(const StoredCheckpoint& checkpoint, const std::vector<uint32_t>& tensors) {
  uint64_t wanted = 0;
  for (const uint32_t tensor : tensors) {
    wanted += static_cast<uint64_t>(checkpoint.manifest.layout[tensor].elements()) * sizeof(float);
  }
  uint64_t there = 0;
  for (uint32_t shard = 0; shard < checkpoint.manifest.shards.size(); ++shard) {
    const std::string path = ShardValuesPath(checkpoint.folder, checkpoint.manifest, shard);
    std::error_code error;
    const uint64_t bytes = std::filesystem::file_size(path, error);
    if (error) return absl::NotFoundError(absl::StrCat(path, ": ", error.message()));
    there += bytes;
  }
  if (there >= wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(checkpoint.folder, ": its shards' files have ", there, " bytes, fewer than the weights: ", wanted));
}

}  // namespace

absl::StatusOr<StoredCheckpoint> FindCheckpoint(const std::string& path) {
  absl::StatusOr<StoredCheckpoint> own = Load(path);
  if (!absl::IsNotFound(own.status())) return own;
  const absl::StatusOr<std::vector<CheckpointDir::Entry>> entries = CheckpointDir::Existing(path).List();
  if (!entries.ok()) return entries.status();
  absl::Status first;
  for (const CheckpointDir::Entry& entry : *entries) {
    if (!entry.complete) continue;
    absl::StatusOr<StoredCheckpoint> loaded = Load(entry.path);
    if (loaded.ok() || absl::IsUnimplemented(loaded.status())) return loaded;
    spdlog::warn("a checkpoint is skipped: {}", Message(loaded.status()));
    first.Update(loaded.status());
  }
  PS_RETURN_IF_ERROR(first);
  if (!entries->empty()) return absl::NotFoundError(path + ": none of its checkpoints is complete");
  return absl::NotFoundError(path + ": no complete checkpoint: it has no manifest.json, and no folder of one");
}

absl::StatusOr<std::vector<std::vector<float>>> ReadStoredWeights(const StoredCheckpoint& checkpoint,
                                                                  const std::vector<uint32_t>& tensors) {
  PS_RETURN_IF_ERROR(CheckSize(checkpoint, tensors));
  std::vector<std::vector<float>> values(tensors.size());
  std::vector<WantedPart> wanted;
  try {
    for (size_t i = 0; i < tensors.size(); ++i) {
      values[i].resize(static_cast<size_t>(checkpoint.manifest.layout[tensors[i]].elements()));
      wanted.push_back({.tensor = tensors[i], .first = 0, .weights = values[i], .state = {}});
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(checkpoint.folder + ": not enough memory for the weights");
  }
  PS_RETURN_IF_ERROR(ReadParts(checkpoint.folder, checkpoint.manifest, wanted));
  return values;
}

}  // namespace ps
