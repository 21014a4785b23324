#include "common/checkpoint/shard_checkpoint.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/checkpoint/json_fields.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kShardFormat = 1;

// A part that the file of values has.
struct StoredPart {
  struct Values {
    std::string name;      // The tensor's, in the file.
    std::string checksum;  // XXH3-128 of the bytes.
  };
  uint32_t tensor = 0;
  int64_t first = 0;
  int64_t elements = 0;
  int64_t skipped = 0;
  Values weights;
  std::vector<Values> state;
};

struct ShardRecord {
  uint64_t bytes = 0;  // The file's size.
  std::vector<StoredPart> parts;
};

// A record file.
struct RecordFile {
  ShardCheckpoint checkpoint;
  ShardRecord record;
};

std::string PathOf(const std::string& folder, uint32_t shard, size_t num_shards, const char* type) {
  return absl::StrCat(folder, "/shard-", shard, "-of-", num_shards, type);
}

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

std::vector<int64_t> ShapeOf(const TensorSpec& tensor, int64_t first, int64_t elements) {
  return IsWhole(tensor, first, elements) ? tensor.shape : std::vector<int64_t>{elements};
}

std::span<const char> Bytes(std::span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

StoredPart Describe(const ShardPart& part, const Layout& layout, std::set<std::string>* used) {
  const auto elements = static_cast<int64_t>(part.weights.size());
  const std::string name = PartName(layout[part.tensor], part.first, elements);
  StoredPart stored = {
      .tensor = part.tensor,
      .first = part.first,
      .elements = elements,
      .skipped = part.skipped,
      .weights = {.name = IsWhole(layout[part.tensor], part.first, elements) ? name : Unused(name, used),
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

// Writes the file, without holding more than its header in memory.
absl::StatusOr<ShardRecord> WriteValues(const std::string& path, const Layout& layout,
                                        const std::vector<ShardPart>& parts) {
  ShardRecord record;
  std::set<std::string> used;
  for (const TensorSpec& tensor : layout) used.insert(tensor.name);  // Which are the tensors' own.
  for (const ShardPart& part : parts) record.parts.push_back(Describe(part, layout, &used));
  PS_ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path));
  const std::string header = SafetensorsHeader(Contents(record, layout), {{"format", "pt"}});
  PS_RETURN_IF_ERROR(file.Append(header));
  record.bytes = header.size();
  for (const ShardPart& part : parts) {
    PS_RETURN_IF_ERROR(file.Append(Bytes(part.weights)));
    for (const std::span<const float> state : part.state) PS_RETURN_IF_ERROR(file.Append(Bytes(state)));
    record.bytes += part.weights.size_bytes() * (1 + part.state.size());
  }
  PS_RETURN_IF_ERROR(file.Commit());
  return record;
}

absl::StatusOr<SafetensorsFile> OpenValues(const std::string& path, const Layout& layout, const ShardRecord& record) {
  PS_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  if (file.bytes() != record.bytes) {
    return InvalidArgument(path, ": it has ", file.bytes(), " bytes, and not ", record.bytes);
  }
  bool floats = true;
  for (size_t i = 0; i < file.tensors().size(); ++i) floats = floats && file.type(i) == "F32";
  if (!floats || file.tensors() != Contents(record, layout)) {
    return absl::InvalidArgumentError(path + ": its tensors are not those that its record names");
  }
  return file;
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
  StoredPart part = {.skipped = fields.Signed("skipped"), .weights = {}, .state = {}};
  const Json& weights = fields.Object("weights");
  const Json& state = fields.List("state");
  if (state.size() > kMaxState) fields.Wrong("state", absl::StrCat("expected at most ", kMaxState));
  PS_RETURN_IF_ERROR(fields.End());
  const auto number = tensors.find(tensor);
  if (number == tensors.end()) return InvalidArgument(place, "tensor: the model has no ", tensor);
  part.tensor = number->second;
  if (first >= end || end > static_cast<uint64_t>(layout[part.tensor].elements())) {
    return InvalidArgument(place, "tensor ", tensor, " has no elements ", first, " to ", end);
  }
  part.first = static_cast<int64_t>(first);
  part.elements = static_cast<int64_t>(end - first);
  PS_ASSIGN_OR_RETURN(part.weights, ValuesFrom(weights, absl::StrCat(place, "weights: "), names));
  for (const Json& item : state) {
    const std::string where = absl::StrCat(place, "state: ", part.state.size(), ": ");
    PS_ASSIGN_OR_RETURN(part.state.emplace_back(), ValuesFrom(item, where, names));
  }
  return part;
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

// INVALID_ARGUMENT, naming the field or part, for anything that ToJson does not give: parts of other tensors, or beyond
// their ends.
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
    PS_ASSIGN_OR_RETURN(StoredPart part, PartFrom(item, place, layout, tensors, &names));
    record.parts.push_back(std::move(part));
  }
  return record;
}

Json ShardToJson(const ShardCheckpoint& checkpoint, const ShardRecord& record, const Layout& layout) {
  return {
      {"format", kShardFormat},          {"shard", checkpoint.shard},           {"num_shards", checkpoint.num_shards},
      {"version", checkpoint.version},   {"generation", checkpoint.generation}, {"state", checkpoint.state},
      {"record", ToJson(record, layout)}};
}

absl::StatusOr<RecordFile> ShardFromJson(const Json& json, const Layout& layout) {
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
  PS_ASSIGN_OR_RETURN(ShardRecord read, ShardRecordFromJson(record, layout));
  checkpoint.state = state;
  return RecordFile{.checkpoint = std::move(checkpoint), .record = std::move(read)};
}

absl::Status Compare(const ShardCheckpoint& checkpoint, const Manifest& manifest, uint32_t shard) {
  const auto compare = [](const char* field, uint64_t value, uint64_t expected) {
    if (value == expected) return absl::OkStatus();
    return InvalidArgument(field, ": it is ", value, ", and ", expected, " for the checkpoint's manifest");
  };
  PS_RETURN_IF_ERROR(compare("shard", checkpoint.shard, shard));
  PS_RETURN_IF_ERROR(compare("num_shards", checkpoint.num_shards, manifest.shards.size()));
  PS_RETURN_IF_ERROR(compare("version", checkpoint.version, manifest.shards[shard].version));
  return compare("generation", checkpoint.generation, manifest.generation);
}

absl::StatusOr<RecordFile> ReadRecordFile(const std::string& folder, const Manifest& manifest, uint32_t shard) {
  Check(shard < manifest.shards.size(), "the manifest has this shard");
  const std::string path = PathOf(folder, shard, manifest.shards.size(), ".json");
  PS_ASSIGN_OR_RETURN(const CheckedJson checked, ReadCheckedJson(path));
  if (checked.checksum != manifest.shards[shard].checksum) {
    return absl::InvalidArgumentError(path + ": it is of another checkpoint: its checksum is not the manifest's");
  }
  PS_ASSIGN_OR_RETURN(RecordFile read, Annotate(ShardFromJson(checked.json, manifest.layout), path));
  PS_RETURN_IF_ERROR(Annotate(Compare(read.checkpoint, manifest, shard), path));
  return read;
}

constexpr int64_t kBlockElements = 262144;  // That are read at a time.

int64_t End(const WantedPart& part) { return part.first + static_cast<int64_t>(part.weights.size()); }
int64_t End(const StoredPart& part) { return part.first + part.elements; }

// What is wanted of each tensor, in the order of the elements.
class Wanted {
 public:
  Wanted(const std::vector<WantedPart>& wanted, const Layout& layout) : by_tensor_(layout.size()) {
    for (const WantedPart& part : wanted) {
      Check(part.tensor < layout.size() && part.first >= 0 && End(part) <= layout[part.tensor].elements(),
            "elements that are wanted are the tensor's");
      for (const std::span<float> state : part.state) {
        Check(state.size() == part.weights.size(), "state that is wanted is as long as the weights");
      }
      if (part.skipped != nullptr) {
        *part.skipped = part.weights.empty() ? 0 : std::numeric_limits<int64_t>::min();
      }
      if (!part.weights.empty()) by_tensor_[part.tensor].push_back(&part);
    }
    for (List& list : by_tensor_) {
      std::sort(list.begin(), list.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
      for (size_t i = 1; i < list.size(); ++i)
        Check(End(*list[i - 1]) <= list[i]->first, "wanted parts do not overlap");
    }
  }

  using List = std::vector<const WantedPart*>;
  const std::vector<List>& by_tensor() const { return by_tensor_; }

  // Those with any of these elements.
  std::span<const WantedPart* const> Among(uint32_t tensor, int64_t first, int64_t end) const {
    const List& list = by_tensor_[tensor];
    const auto begin =
        std::partition_point(list.begin(), list.end(), [&](const auto* part) { return End(*part) <= first; });
    const auto stop = std::partition_point(begin, list.end(), [&](const auto* part) { return part->first < end; });
    return {begin, stop};
  }

 private:
  std::vector<List> by_tensor_;
};

// One part that is stored, and where.
struct Source {
  uint32_t shard = 0;
  const StoredPart* part = nullptr;
};

class Reader {
 public:
  Reader(const std::string& folder, const Manifest& manifest, const std::vector<WantedPart>& wanted)
      : folder_(folder), manifest_(manifest), wanted_(wanted, manifest.layout), by_tensor_(manifest.layout.size()) {}

  // All that is needed of the shards' records is known before the first values are read.
  absl::Status Run(std::optional<uint32_t> own) {
    if (own.has_value()) PS_RETURN_IF_ERROR(ReadRecord(*own));
    if (!own.has_value() || !CheckParts().ok()) {
      for (uint32_t shard = 0; shard < manifest_.shards.size(); ++shard) {
        if (shard != own) PS_RETURN_IF_ERROR(ReadRecord(shard));
      }
      PS_RETURN_IF_ERROR(CheckParts());
    }
    for (const auto& [shard, record] : records_) PS_RETURN_IF_ERROR(ReadShard(shard, record));
    return absl::OkStatus();
  }

 private:
  absl::Status ReadRecord(uint32_t shard) {
    PS_ASSIGN_OR_RETURN(RecordFile read, ReadRecordFile(folder_, manifest_, shard));
    const ShardRecord& record = records_[shard] = std::move(read.record);
    for (const StoredPart& part : record.parts) by_tensor_[part.tensor].push_back({.shard = shard, .part = &part});
    for (std::vector<Source>& sources : by_tensor_) {
      std::sort(sources.begin(), sources.end(),
                [](const Source& a, const Source& b) { return a.part->first < b.part->first; });
    }
    return absl::OkStatus();
  }

  // Whether the records that are read have each element that is wanted, and none of them twice.
  absl::Status CheckParts() const {
    for (uint32_t tensor = 0; tensor < by_tensor_.size(); ++tensor) {
      PS_RETURN_IF_ERROR(CheckOverlaps(by_tensor_[tensor]));
      for (const WantedPart* part : wanted_.by_tensor()[tensor]) PS_RETURN_IF_ERROR(CheckCovered(*part));
    }
    return absl::OkStatus();
  }

  absl::Status CheckOverlaps(const std::vector<Source>& sources) const {
    for (size_t i = 1; i < sources.size(); ++i) {
      const StoredPart& next = *sources[i].part;
      if (End(*sources[i - 1].part) <= next.first) continue;
      return InvalidArgument(Path(sources[i].shard), ": element ", next.first, " of tensor ",
                             manifest_.layout[next.tensor].name, " is also in ", Path(sources[i - 1].shard));
    }
    return absl::OkStatus();
  }

  absl::Status CheckCovered(const WantedPart& wanted) const {
    const std::vector<Source>& sources = by_tensor_[wanted.tensor];
    auto source = std::partition_point(sources.begin(), sources.end(),
                                       [&](const Source& s) { return End(*s.part) <= wanted.first; });
    for (int64_t at = wanted.first; at < End(wanted); at = End(*source->part), ++source) {
      if (source == sources.end() || source->part->first > at) {
        return InvalidArgument(folder_, ": no shard's file has element ", at, " of tensor ",
                               manifest_.layout[wanted.tensor].name);
      }
      const StoredPart& part = *source->part;
      if (wanted.skipped != nullptr) *wanted.skipped = std::max(*wanted.skipped, part.skipped);
      if (wanted.state.empty() || wanted.state.size() == part.state.size()) continue;
      return InvalidArgument(Path(source->shard), ": tensor ", part.weights.name, " has ", part.state.size(),
                             " tensors of optimizer state, and not ", wanted.state.size());
    }
    return absl::OkStatus();
  }

  absl::Status ReadShard(uint32_t shard, const ShardRecord& record) const {
    const auto is_wanted = [this](const StoredPart& part) { return !WantedOf(part).empty(); };
    if (std::none_of(record.parts.begin(), record.parts.end(), is_wanted)) return absl::OkStatus();
    PS_ASSIGN_OR_RETURN(const SafetensorsFile file, OpenValues(Path(shard), manifest_.layout, record));
    size_t number = 0;  // The part's first tensor has it in the file.
    for (const StoredPart& part : record.parts) {
      if (is_wanted(part)) PS_RETURN_IF_ERROR(ReadPart(file, number, part));
      number += 1 + part.state.size();
    }
    return absl::OkStatus();
  }

  absl::Status ReadPart(const SafetensorsFile& file, size_t number, const StoredPart& part) const {
    const auto weights = [](const WantedPart& wanted) { return wanted.weights; };
    PS_RETURN_IF_ERROR(ReadValues(file, number, part, part.weights, weights));
    const auto wanted = WantedOf(part);
    if (std::all_of(wanted.begin(), wanted.end(), [](const auto* w) { return w->state.empty(); })) {
      return absl::OkStatus();
    }
    for (size_t k = 0; k < part.state.size(); ++k) {
      const auto state = [k](const WantedPart& one) { return one.state.empty() ? std::span<float>() : one.state[k]; };
      PS_RETURN_IF_ERROR(ReadValues(file, number + 1 + k, part, part.state[k], state));
    }
    return absl::OkStatus();
  }

  // Reads this tensor of the file, block by block, into what `target` gives of each part that is wanted; nothing, if
  // that is empty. INVALID_ARGUMENT at the end if the checksum is not that of the values: then what was filled is worth
  // nothing.
  template <typename Target>
  absl::Status ReadValues(const SafetensorsFile& file, size_t number, const StoredPart& part,
                          const StoredPart::Values& values, const Target& target) const {
    std::vector<float> buffer(static_cast<size_t>(std::min(part.elements, kBlockElements)));
    RunningHash hash;
    for (int64_t at = 0; at < part.elements; at += kBlockElements) {
      const std::span<float> some(buffer.data(), static_cast<size_t>(std::min(part.elements - at, kBlockElements)));
      PS_RETURN_IF_ERROR(file.Read(number, at, some));
      hash.Add(Bytes(some));
      Fill(part.tensor, part.first + at, some, target);
    }
    if (hash.Hex() == values.checksum) return absl::OkStatus();
    return InvalidArgument(file.path(), ": tensor ", values.name, " is damaged: its checksum is another one");
  }

  template <typename Target>
  void Fill(uint32_t tensor, int64_t first, std::span<const float> values, const Target& target) const {
    const int64_t end = first + static_cast<int64_t>(values.size());
    for (const WantedPart* wanted : wanted_.Among(tensor, first, end)) {
      const std::span<float> to = target(*wanted);
      if (to.empty()) continue;
      const int64_t from = std::max(first, wanted->first);
      const int64_t count = std::min(end, End(*wanted)) - from;
      std::copy_n(values.begin() + (from - first), count, to.begin() + (from - wanted->first));
    }
  }

  std::span<const WantedPart* const> WantedOf(const StoredPart& part) const {
    return wanted_.Among(part.tensor, part.first, End(part));
  }
  std::string Path(uint32_t shard) const { return ShardValuesPath(folder_, manifest_, shard); }

  const std::string& folder_;
  const Manifest& manifest_;
  const Wanted wanted_;
  std::map<uint32_t, ShardRecord> records_;     // Keyed by shard.
  std::vector<std::vector<Source>> by_tensor_;  // Each tensor's, in the order of its elements.
};

}  // namespace

absl::StatusOr<std::string> WriteShardCheckpoint(const std::string& folder, const Layout& layout,
                                                 const ShardCheckpoint& checkpoint,
                                                 const std::vector<ShardPart>& parts) {
  const std::string values = PathOf(folder, checkpoint.shard, checkpoint.num_shards, ".safetensors");
  PS_ASSIGN_OR_RETURN(const ShardRecord record, WriteValues(values, layout, parts));
  return WriteCheckedJson(PathOf(folder, checkpoint.shard, checkpoint.num_shards, ".json"),
                          ShardToJson(checkpoint, record, layout));
}

absl::StatusOr<ShardCheckpoint> ReadShardCheckpoint(const std::string& folder, const Manifest& manifest,
                                                    uint32_t shard) {
  PS_ASSIGN_OR_RETURN(RecordFile read, ReadRecordFile(folder, manifest, shard));
  return std::move(read.checkpoint);
}

std::string ShardValuesPath(const std::string& folder, const Manifest& manifest, uint32_t shard) {
  return PathOf(folder, shard, manifest.shards.size(), ".safetensors");
}

absl::Status ReadParts(const std::string& folder, const Manifest& manifest, const std::vector<WantedPart>& wanted,
                       std::optional<uint32_t> own) {
  return Reader(folder, manifest, wanted).Run(own);
}

}  // namespace ps
