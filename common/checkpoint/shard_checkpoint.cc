#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/checkpoint/json_fields.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kShardFormat = 1;

std::string PathOf(const std::string& folder, uint32_t shard, size_t num_shards, const char* type) {
  return absl::StrCat(folder, "/shard-", shard, "-of-", num_shards, type);
}

Json ShardToJson(const ShardCheckpoint& checkpoint, const ShardRecord& record, const Layout& layout) {
  return {
      {"format", kShardFormat},          {"shard", checkpoint.shard},           {"num_shards", checkpoint.num_shards},
      {"version", checkpoint.version},   {"generation", checkpoint.generation}, {"state", checkpoint.state},
      {"record", ToJson(record, layout)}};
}

absl::StatusOr<ShardCheckpoint> ShardFromJson(const Json& json, const Layout& layout) {
  JsonFields fields(json);
  fields.Format(kShardFormat);
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

constexpr int64_t kBlockElements = 262144;  // That are read at a time.

bool IsWhole(const TensorSpec& tensor, int64_t first, int64_t elements) {
  return first == 0 && elements == tensor.elements();
}

std::string PartName(const TensorSpec& tensor, int64_t first, int64_t elements) {
  if (IsWhole(tensor, first, elements)) return tensor.name;
  return absl::StrCat(tensor.name, "[", first, ":", first + elements, "]");
}

// A tensor may have any name, also one that looks like a part of another, or like its state.
std::string Unused(std::string name, std::set<std::string>* used) {
  while (!used->insert(name).second) name += "'";
  return name;
}

std::string WeightsName(const TensorSpec& tensor, int64_t first, int64_t elements, std::set<std::string>* used) {
  const std::string name = PartName(tensor, first, elements);
  return IsWhole(tensor, first, elements) ? name : Unused(name, used);
}

std::vector<int64_t> ShapeOf(const TensorSpec& tensor, int64_t first, int64_t elements) {
  return IsWhole(tensor, first, elements) ? tensor.shape : std::vector<int64_t>{elements};
}

std::span<const char> Bytes(std::span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

StoredPart Describe(const ShardPart& part, const Layout& layout, std::set<std::string>* used) {
  const auto elements = static_cast<int64_t>(part.weights.size());
  const std::string name = PartName(layout[part.tensor], part.first, elements);
  StoredPart stored = {.tensor = part.tensor,
                       .first = part.first,
                       .elements = elements,
                       .skipped = part.skipped,
                       .weights = {.name = WeightsName(layout[part.tensor], part.first, elements, used),
                                   .checksum = HexHash(Bytes(part.weights))},
                       .state = {}};
  for (size_t k = 0; k < part.state.size(); ++k) {
    stored.state.push_back(
        {.name = Unused(absl::StrCat(name, ".state", k), used), .checksum = HexHash(Bytes(part.state[k]))});
  }
  return stored;
}

// The tensors of the file: everything that the record names, in the order of the file.
std::vector<TensorSpec> Contents(const ShardRecord& record, const Layout& layout) {
  std::vector<TensorSpec> contents;
  for (const StoredPart& part : record.parts) {
    const std::vector<int64_t> shape = ShapeOf(layout[part.tensor], part.first, part.elements);
    contents.push_back({.name = part.weights.name, .shape = shape});
    for (const StoredPart::Values& state : part.state) contents.push_back({.name = state.name, .shape = shape});
  }
  return contents;
}

constexpr size_t kMaxState = 16;  // Tensors of an optimizer's state; far more than any has.

Json ToJson(const StoredPart::Values& values) { return {{"name", values.name}, {"xxh3_128", values.checksum}}; }

constexpr const char* kPlace = "the record of a shard file: ";

absl::StatusOr<StoredPart::Values> ValuesFrom(const Json& json, const std::string& place,
                                              std::set<std::string>* names) {
  JsonFields fields(json, place);
  StoredPart::Values values = {.name = fields.Text("name"), .checksum = fields.Checksum("xxh3_128")};
  if (!names->insert(values.name).second) fields.Wrong("name", absl::StrCat(values.name, " is there twice"));
  PS_RETURN_IF_ERROR(fields.End());
  return values;
}

using Tensors = absl::flat_hash_map<std::string, uint32_t>;  // Their numbers, by their names.

absl::StatusOr<StoredPart> PartFrom(const Json& json, const std::string& place, const Layout& layout,
                                    const Tensors& tensors, std::set<std::string>* names) {
  JsonFields fields(json, place);
  const std::string tensor = fields.Text("tensor");
  const uint64_t first = fields.Number("first");
  const uint64_t end = fields.Number("end");
  StoredPart part = {.skipped = fields.Number("skipped"), .weights = {}, .state = {}};
  const Json& weights = fields.Object("weights");
  const Json& state = fields.List("state");
  if (state.size() > kMaxState) fields.Wrong("state", absl::StrCat("expected at most ", kMaxState));
  PS_RETURN_IF_ERROR(fields.End());
  const auto number = tensors.find(tensor);
  if (number == tensors.end()) {
    return absl::InvalidArgumentError(absl::StrCat(place, "tensor: the model has no ", tensor));
  }
  part.tensor = number->second;
  if (first >= end || end > static_cast<uint64_t>(layout[part.tensor].elements())) {
    return absl::InvalidArgumentError(absl::StrCat(place, "tensor ", tensor, " has no elements ", first, " to ", end));
  }
  part.first = static_cast<int64_t>(first);
  part.elements = static_cast<int64_t>(end - first);
  absl::StatusOr<StoredPart::Values> values = ValuesFrom(weights, absl::StrCat(place, "weights: "), names);
  if (!values.ok()) return values.status();
  part.weights = *std::move(values);
  for (const Json& item : state) {
    values = ValuesFrom(item, absl::StrCat(place, "state: ", part.state.size(), ": "), names);
    if (!values.ok()) return values.status();
    part.state.push_back(*std::move(values));
  }
  return part;
}

}  // namespace

absl::StatusOr<std::string> WriteShardCheckpoint(const std::string& folder, const Layout& layout,
                                                 const ShardCheckpoint& checkpoint,
                                                 const std::vector<ShardPart>& parts) {
  const std::string values = PathOf(folder, checkpoint.shard, checkpoint.num_shards, ".safetensors");
  const absl::StatusOr<ShardRecord> record = WriteShardFile(values, layout, parts);
  if (!record.ok()) return record.status();
  return WriteCheckedJson(PathOf(folder, checkpoint.shard, checkpoint.num_shards, ".json"),
                          ShardToJson(checkpoint, *record, layout));
}

absl::StatusOr<ShardCheckpoint> ReadShardCheckpoint(const std::string& folder, const Manifest& manifest,
                                                    uint32_t shard) {
  Check(shard < manifest.shards.size(), "the manifest has this shard");
  const std::string path = PathOf(folder, shard, manifest.shards.size(), ".json");
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
  return PathOf(folder, shard, manifest.shards.size(), ".safetensors");
}

absl::StatusOr<ShardRecord> WriteShardFile(const std::string& path, const Layout& layout,
                                           const std::vector<ShardPart>& parts) {
  ShardRecord record;
  std::set<std::string> used;
  for (const TensorSpec& tensor : layout) used.insert(tensor.name);  // Which are the tensors' own.
  for (const ShardPart& part : parts) record.parts.push_back(Describe(part, layout, &used));
  absl::StatusOr<NewFile> file = NewFile::Create(path);
  if (!file.ok()) return file.status();
  const std::string header = SafetensorsHeader(Contents(record, layout), {{"format", "pt"}});
  PS_RETURN_IF_ERROR(file->Append(header));
  record.bytes = header.size();
  for (const ShardPart& part : parts) {
    PS_RETURN_IF_ERROR(file->Append(Bytes(part.weights)));
    for (const std::span<const float> state : part.state) PS_RETURN_IF_ERROR(file->Append(Bytes(state)));
    record.bytes += part.weights.size_bytes() * (1 + part.state.size());
  }
  PS_RETURN_IF_ERROR(file->Commit());
  return record;
}

absl::StatusOr<ShardFile> ShardFile::Open(const std::string& path, const Layout& layout, const ShardRecord& record) {
  absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  if (file->bytes() != record.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": it has ", file->bytes(), " bytes, and not ", record.bytes));
  }
  bool floats = true;
  for (size_t i = 0; i < file->tensors().size(); ++i) floats = floats && file->type(i) == "F32";
  if (!floats || file->tensors() != Contents(record, layout)) {
    return absl::InvalidArgumentError(path + ": its tensors are not those that its record names");
  }
  return ShardFile(*std::move(file));
}

ShardFile::ShardFile(SafetensorsFile file) : file_(std::move(file)) {
  for (size_t i = 0; i < file_.tensors().size(); ++i) numbers_[file_.tensors()[i].name] = i;
}

absl::Status ShardFile::Read(const StoredPart& part, const StoredPart::Values& values, const Block& block) const {
  const size_t number = numbers_.at(values.name);
  std::vector<float> buffer(static_cast<size_t>(std::min(part.elements, kBlockElements)));
  RunningHash hash;
  for (int64_t at = 0; at < part.elements; at += kBlockElements) {
    const std::span<float> some(buffer.data(), static_cast<size_t>(std::min(part.elements - at, kBlockElements)));
    PS_RETURN_IF_ERROR(file_.Read(number, at, some));
    hash.Add(Bytes(some));
    block(part.first + at, some);
  }
  if (hash.Hex() == values.checksum) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(file_.path(), ": tensor ", values.name, " is damaged: its checksum is another one"));
}

// {"bytes": …, "parts": [{"tensor": NAME, "first": …, "end": …, "skipped": …, "weights": {"name": …, "xxh3_128": …},
// "state": […]}]}

Json ToJson(const ShardRecord& record, const Layout& layout) {
  Json parts = Json::array();
  for (const StoredPart& part : record.parts) {
    Json state = Json::array();
    for (const StoredPart::Values& values : part.state) state.push_back(ToJson(values));
    parts.push_back({{"tensor", layout[part.tensor].name},
                     {"first", part.first},
                     {"end", part.first + part.elements},
                     {"skipped", part.skipped},
                     {"weights", ToJson(part.weights)},
                     {"state", std::move(state)}});
  }
  return {{"bytes", record.bytes}, {"parts", std::move(parts)}};
}

absl::StatusOr<ShardRecord> ShardRecordFromJson(const Json& json, const Layout& layout) {
  JsonFields fields(json, kPlace);
  ShardRecord record = {.bytes = fields.Number("bytes"), .parts = {}};
  const Json& parts = fields.List("parts");
  PS_RETURN_IF_ERROR(fields.End());
  Tensors tensors;
  for (size_t i = 0; i < layout.size(); ++i) tensors[layout[i].name] = static_cast<uint32_t>(i);
  std::set<std::string> names;
  for (const Json& item : parts) {
    const std::string place = absl::StrCat(kPlace, "parts: ", record.parts.size(), ": ");
    absl::StatusOr<StoredPart> part = PartFrom(item, place, layout, tensors, &names);
    if (!part.ok()) return part.status();
    record.parts.push_back(*std::move(part));
  }
  return record;
}

}  // namespace ps
