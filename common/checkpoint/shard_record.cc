// A shard file's record as JSON: {"bytes": …, "parts": [{"tensor": NAME, "first": …, "end": …, "skipped": …, "weights":
// {"name": …, "xxh3_128": …}, "state": […]}]}
#include <algorithm>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/shard_file.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxState = 16;  // Tensors of an optimizer's state; far more than any has.

Json ToJson(const StoredPart::Values& values) { return {{"name", values.name}, {"xxh3_128", values.checksum}}; }

absl::Status Bad(const std::string& what) { return absl::InvalidArgumentError("the record of a shard file: " + what); }

absl::StatusOr<uint64_t> Number(const Json& json, const char* field) {
  const auto found = json.find(field);
  if (found == json.end() || !found->is_number_unsigned()) return Bad(absl::StrCat(field, ": expected a number"));
  return found->get<uint64_t>();
}

absl::StatusOr<std::string> Text(const Json& json, const char* field) {
  const auto found = json.find(field);
  if (found == json.end() || !found->is_string()) return Bad(absl::StrCat(field, ": expected a text"));
  return found->get<std::string>();
}

absl::StatusOr<StoredPart::Values> ValuesFrom(const Json& json, std::set<std::string>* names) {
  if (!json.is_object()) return Bad("expected name and xxh3_128");
  const absl::StatusOr<std::string> name = Text(json, "name");
  if (!name.ok()) return name.status();
  const absl::StatusOr<std::string> checksum = Text(json, "xxh3_128");
  if (!checksum.ok()) return checksum.status();
  if (!names->insert(*name).second) return Bad(absl::StrCat("name: ", *name, " is there twice"));
  return StoredPart::Values{.name = *name, .checksum = *checksum};
}

absl::Status ReadRange(const Json& json, const TensorSpec& tensor, StoredPart* part) {
  const absl::StatusOr<uint64_t> first = Number(json, "first");
  if (!first.ok()) return first.status();
  const absl::StatusOr<uint64_t> end = Number(json, "end");
  if (!end.ok()) return end.status();
  const absl::StatusOr<uint64_t> skipped = Number(json, "skipped");
  if (!skipped.ok()) return skipped.status();
  if (*first >= *end || *end > static_cast<uint64_t>(tensor.elements())) {
    return Bad(absl::StrCat("tensor ", tensor.name, " has no elements ", *first, " to ", *end));
  }
  part->first = static_cast<int64_t>(*first);
  part->elements = static_cast<int64_t>(*end - *first);
  part->skipped = *skipped;
  return absl::OkStatus();
}

using Tensors = absl::flat_hash_map<std::string, uint32_t>;  // Their numbers, by their names.

absl::StatusOr<StoredPart> PartFrom(const Json& json, const Layout& layout, const Tensors& tensors,
                                    std::set<std::string>* names) {
  if (!json.is_object()) return Bad("parts: expected objects");
  const absl::StatusOr<std::string> tensor = Text(json, "tensor");
  if (!tensor.ok()) return tensor.status();
  const auto number = tensors.find(*tensor);
  if (number == tensors.end()) return Bad(absl::StrCat("tensor: the model has no ", *tensor));
  StoredPart part;
  part.tensor = number->second;
  PS_RETURN_IF_ERROR(ReadRange(json, layout[part.tensor], &part));
  const auto weights = json.find("weights");
  const auto state = json.find("state");
  if (weights == json.end() || state == json.end() || !state->is_array() || state->size() > kMaxState) {
    return Bad(absl::StrCat("tensor ", *tensor, ": expected weights and state"));
  }
  absl::StatusOr<StoredPart::Values> values = ValuesFrom(*weights, names);
  if (!values.ok()) return values.status();
  part.weights = *std::move(values);
  for (const Json& item : *state) {
    values = ValuesFrom(item, names);
    if (!values.ok()) return values.status();
    part.state.push_back(*std::move(values));
  }
  return part;
}

}  // namespace

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
  if (!json.is_object()) return Bad("expected an object");
  const absl::StatusOr<uint64_t> bytes = Number(json, "bytes");
  if (!bytes.ok()) return bytes.status();
  const auto parts = json.find("parts");
  if (parts == json.end() || !parts->is_array()) return Bad("parts: expected a list");
  Tensors tensors;
  for (size_t i = 0; i < layout.size(); ++i) tensors[layout[i].name] = static_cast<uint32_t>(i);
  ShardRecord record = {.bytes = *bytes, .parts = {}};
  std::set<std::string> names;
  for (const Json& item : *parts) {
    absl::StatusOr<StoredPart> part = PartFrom(item, layout, tensors, &names);
    if (!part.ok()) return part.status();
    record.parts.push_back(*std::move(part));
  }
  return record;
}

}  // namespace ps
