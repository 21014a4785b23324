// A shard file's record as JSON: {"bytes": …, "parts": [{"tensor": NAME, "first": …, "end": …, "skipped": …, "weights":
// {"name": …, "xxh3_128": …}, "state": […]}]}
#include <set>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/json_fields.h"
#include "common/checkpoint/shard_file.h"
#include "common/status.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

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
