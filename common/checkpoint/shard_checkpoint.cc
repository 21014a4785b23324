#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/checkpoint/checked_json.h"
#include "common/checkpoint/json_fields.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kShardFormat = 1;

std::string FileName(const std::string& folder, uint32_t shard, size_t num_shards, const char* type) {
  return absl::StrCat(folder, "/shard-", shard, "-of-", num_shards, type);
}

std::string RecordPath(const std::string& folder, uint32_t shard, size_t num_shards) {
  return FileName(folder, shard, num_shards, ".json");
}

std::string ValuesPath(const std::string& folder, uint32_t shard, size_t num_shards) {
  return FileName(folder, shard, num_shards, ".safetensors");
}

Json ShardToJson(const ShardCheckpoint& checkpoint, const ShardRecord& record, const Layout& layout) {
  return {
      {"format", kShardFormat},          {"shard", checkpoint.shard},           {"num_shards", checkpoint.num_shards},
      {"version", checkpoint.version},   {"generation", checkpoint.generation}, {"state", checkpoint.state},
      {"record", ToJson(record, layout)}};
}

absl::StatusOr<ShardCheckpoint> ShardFromJson(const Json& json, const Layout& layout) {
  JsonFields fields(json);
  const uint64_t format = fields.Number("format");
  if (format > kShardFormat) {
    return absl::UnimplementedError(absl::StrCat("format: it is ", format, ", and this program reads ", kShardFormat));
  }
  if (format < kShardFormat) fields.Wrong("format", "expected a number, at least 1");
  ShardCheckpoint checkpoint;
  checkpoint.shard = static_cast<uint32_t>(fields.Number("shard", std::numeric_limits<uint32_t>::max()));
  checkpoint.num_shards = static_cast<uint32_t>(fields.Number("num_shards", std::numeric_limits<uint32_t>::max()));
  checkpoint.version = fields.Number("version");
  checkpoint.generation = fields.Number("generation");
  const Json& state = fields.Object("state");
  const Json& record = fields.Object("record");
  PS_RETURN_IF_ERROR(fields.End());
  absl::StatusOr<ShardRecord> read = ShardRecordFromJson(record, layout);
  if (!read.ok()) return read.status();
  checkpoint.record = *std::move(read);
  checkpoint.state = state;
  return checkpoint;
}

absl::Status Compare(const ShardCheckpoint& checkpoint, const Manifest& manifest, uint32_t shard) {
  const auto compare = [](const char* field, uint64_t value, uint64_t expected) {
    if (value == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": it is ", value, ", and ", expected, " for the checkpoint's manifest"));
  };
  PS_RETURN_IF_ERROR(compare("shard", checkpoint.shard, shard));
  PS_RETURN_IF_ERROR(compare("num_shards", checkpoint.num_shards, manifest.shards.size()));
  PS_RETURN_IF_ERROR(compare("version", checkpoint.version, manifest.shards[shard].version));
  return compare("generation", checkpoint.generation, manifest.generation);
}

}  // namespace

absl::StatusOr<std::string> WriteShardCheckpoint(const std::string& folder, const Layout& layout,
                                                 const ShardCheckpoint& checkpoint,
                                                 const std::vector<ShardPart>& parts) {
  const std::string values = ValuesPath(folder, checkpoint.shard, checkpoint.num_shards);
  const absl::StatusOr<ShardRecord> record = WriteShardFile(values, layout, parts);
  if (!record.ok()) return record.status();
  return WriteCheckedJson(RecordPath(folder, checkpoint.shard, checkpoint.num_shards),
                          ShardToJson(checkpoint, *record, layout));
}

absl::StatusOr<ShardCheckpoint> ReadShardCheckpoint(const std::string& folder, const Manifest& manifest,
                                                    uint32_t shard) {
  Check(shard < manifest.shards.size(), "the manifest has this shard");
  const std::string path = RecordPath(folder, shard, manifest.shards.size());
  const absl::StatusOr<CheckedJson> checked = ReadCheckedJson(path);
  if (!checked.ok()) return checked.status();
  if (checked->checksum != manifest.shards[shard].checksum) {
    return absl::InvalidArgumentError(path + ": it is of another checkpoint: its checksum is not the manifest's");
  }
  absl::StatusOr<ShardCheckpoint> checkpoint = ShardFromJson(checked->json, manifest.layout);
  if (!checkpoint.ok()) return Annotate(checkpoint.status(), path);
  PS_RETURN_IF_ERROR(Annotate(Compare(*checkpoint, manifest, shard), path));
  return checkpoint;
}

std::string ShardValuesPath(const std::string& folder, const Manifest& manifest, uint32_t shard) {
  return ValuesPath(folder, shard, manifest.shards.size());
}

}  // namespace ps
