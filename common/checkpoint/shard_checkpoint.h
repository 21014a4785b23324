// One shard's two files of a checkpoint: a safetensors file with the values, which any reader of that format reads, and
// beside it the record of what is where, with the shard's own state. And reading values back, of a checkpoint that any
// number of shards has written.
//
// A part is a run of elements of one tensor, in row-major order. The file has it as NAME, with the tensor's shape,
// where it is the whole tensor, and else as NAME[first:end]. The optimizer's state of these elements follows under the
// same name and a suffix. Elements are named, and never slices or padding, so that another number of servers, or
// another size of slices, can read it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "ps/tensor.h"

namespace ps {

// What is to be written; the memory is the caller's.
struct ShardPart {
  uint32_t tensor = 0;  // Its index in the layout.
  int64_t first = 0;    // Index of its first element in the tensor.
  std::span<const float> weights;
  std::vector<std::span<const float>> state;  // Each as long as the weights. As many in all parts.
  // Versions that were made without any gradient of it, less the updates that it had had before the first: it may be
  // below 0.
  int64_t skipped = 0;
};

// What the record says beside where the values are.
struct ShardCheckpoint {
  uint32_t shard = 0;
  uint32_t num_shards = 0;
  uint64_t version = 0;
  uint64_t generation = 0;
  nlohmann::ordered_json state = nlohmann::ordered_json::object();  // Its fields are the server's business.
};

// Writes FOLDER/shard-I-of-S.safetensors and then FOLDER/shard-I-of-S.json, each as NewFile does. Returns the checksum
// of the latter, for the manifest. Waits for the disk. Errors name the file.
absl::StatusOr<std::string> WriteShardCheckpoint(const std::string& folder, const Layout& layout,
                                                 const ShardCheckpoint& checkpoint,
                                                 const std::vector<ShardPart>& parts);

// The record file of one shard, which the manifest must have. NOT_FOUND; INVALID_ARGUMENT, naming the file, if it is
// not what the manifest says: its checksum, version, generation and numbers; UNIMPLEMENTED for another format version.
absl::StatusOr<ShardCheckpoint> ReadShardCheckpoint(const std::string& folder, const Manifest& manifest,
                                                    uint32_t shard);

// FOLDER/shard-I-of-S.safetensors.
std::string ShardValuesPath(const std::string& folder, const Manifest& manifest, uint32_t shard);

// Values that are wanted of a checkpoint; the memory is the caller's.
struct WantedPart {
  uint32_t tensor = 0;
  int64_t first = 0;
  std::span<float> weights;
  // Each as long as the weights. Empty: only weights are wanted. Else as many as the checkpoint has.
  std::vector<std::span<float>> state;
  int64_t* skipped = nullptr;  // Where the highest count of the parts that it is in goes; null: nowhere.
};

// Fills all of them, which do not overlap, from the shards' files, each stored tensor of which is read once, and
// checked in whole, if anything of it is wanted. INVALID_ARGUMENT or NOT_FOUND, naming file and tensor: a file is
// missing or damaged, elements are missing or there twice, or the state has another number of tensors; then what was
// filled is worth nothing. If this shard (`own`) has all that is wanted, nothing of the others has to be there.
absl::Status ReadParts(const std::string& folder, const Manifest& manifest, const std::vector<WantedPart>& wanted,
                       std::optional<uint32_t> own = {});

}  // namespace ps
