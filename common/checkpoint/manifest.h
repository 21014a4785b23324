// What makes a folder of shards' files a checkpoint: the model, what the job was started with, and where it was. It is
// written last (by the chief); a folder without one is no checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

struct Manifest {
  struct Shard {
    uint64_t version = 0;  // The cut's.
    std::string checksum;  // Its record file's (WriteShardCheckpoint).

    bool operator==(const Shard&) const = default;
  };

  std::string job;
  uint64_t generation = 0;
  uint64_t number = 0;    // The checkpoint's.
  bool finished = false;  // All workers were done.
  uint32_t num_workers = 0;
  Layout layout;
  std::vector<Shard> shards;                    // The shard's number is the index.
  std::map<std::string, std::string> settings;  // The flags that all servers share, at that start.
  nlohmann::ordered_json state =
      nlohmann::ordered_json::object();  // The chief's. Its fields are the server's business.

  // The highest of its shards'.
  uint64_t version() const;

  bool operator==(const Manifest&) const = default;
};

nlohmann::ordered_json ToJson(const Manifest& manifest);
// INVALID_ARGUMENT, naming the field, for anything that ToJson does not give of a manifest with a valid layout and a
// shard; UNIMPLEMENTED for another format version.
absl::StatusOr<Manifest> ManifestFromJson(const nlohmann::ordered_json& json);

// FOLDER/manifest.json, with a checksum of its own (json_fields.h): once it is there the checkpoint is. Waits for the
// disk. INVALID_ARGUMENT, naming the field, for what could not be read back: no valid layout, no shards, a checksum
// that is none, texts that are not UTF-8. Errors name the file.
absl::Status WriteManifest(const std::string& folder, const Manifest& manifest);
// NOT_FOUND: there is none, so the checkpoint is not complete. INVALID_ARGUMENT if a byte is another one than was
// written; else as ManifestFromJson. Errors name the file.
absl::StatusOr<Manifest> ReadManifest(const std::string& folder);
std::string ManifestPath(const std::string& folder);

}  // namespace ps
