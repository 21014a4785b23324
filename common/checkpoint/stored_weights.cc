#include "common/checkpoint/stored_weights.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_join.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/checkpoint/shard_checkpoint.h"
#include "common/status.h"

namespace ps {
namespace {

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
    if (error == std::errc::no_such_file_or_directory) return absl::NotFoundError(path + ": there is no such file");
    if (error) return Internal(path, ": ", error.message());
    there += bytes;
  }
  if (there >= wanted) return absl::OkStatus();
  return InvalidArgument(checkpoint.folder, ": its shards' files have ", there,
                         " bytes, fewer than the weights: ", wanted);
}

absl::StatusOr<std::vector<std::vector<float>>> ReadTensors(const StoredCheckpoint& checkpoint,
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

// Newest first.
absl::StatusOr<std::vector<std::string>> FoldersIn(const std::string& path) {
  std::error_code error;
  if (std::filesystem::exists(ManifestPath(path), error)) return std::vector<std::string>{path};
  PS_ASSIGN_OR_RETURN(const std::vector<CheckpointDir::Entry> entries, CheckpointDir::Existing(path).List());
  std::vector<std::string> folders;
  for (const CheckpointDir::Entry& entry : entries) {
    if (entry.complete) folders.push_back(entry.path);
  }
  if (!folders.empty()) return folders;
  if (!entries.empty()) return absl::NotFoundError(path + ": none of its checkpoints is complete");
  return absl::NotFoundError(path + ": no complete checkpoint: it has no manifest.json, and no folder of one");
}

}  // namespace

absl::StatusOr<StoredWeights> ReadStoredWeights(const std::string& path, const ChooseTensors& choose) {
  PS_ASSIGN_OR_RETURN(const std::vector<std::string> folders, FoldersIn(path));
  absl::Status first;
  std::vector<std::string> problems;
  for (const std::string& folder : folders) {
    absl::StatusOr<Manifest> manifest = ReadManifest(folder);
    absl::Status problem = manifest.status();
    if (problem.ok()) {
      StoredWeights found = {.checkpoint = {.folder = folder, .manifest = *std::move(manifest)}, .values = {}};
      PS_ASSIGN_OR_RETURN(const std::vector<uint32_t> tensors, choose(found.checkpoint));
      auto values = ReadTensors(found.checkpoint, tensors);
      if (values.ok()) {
        for (const std::string& skipped : problems) spdlog::warn("a checkpoint is skipped: {}", skipped);
        found.values = *std::move(values);
        return found;
      }
      problem = values.status();
    }
    if (absl::IsUnimplemented(problem) || absl::IsResourceExhausted(problem)) return problem;
    first.Update(problem);
    problems.push_back(Message(problem));
  }
  return absl::Status(first.code(), absl::StrJoin(problems, "; "));
}

}  // namespace ps
