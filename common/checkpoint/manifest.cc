#include "common/checkpoint/manifest.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/json_fields.h"
#include "common/slices.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kFormat = 1;

constexpr const char* kKinds[] = {"weight", "constant", "buffer_lowest", "buffer_mean"};  // TensorKind is the index.

// It has as few digits as tell it from other floats, and not as many as tell it from other doubles.
double Short(float value) { return std::strtod(ExactText(value).c_str(), nullptr); }

Json TensorToJson(const TensorSpec& tensor) {
  Json shape = Json::array();
  for (const int64_t dimension : tensor.shape) shape.push_back(static_cast<uint64_t>(dimension));
  Json json = {{"name", tensor.name},
               {"shape", std::move(shape)},
               {"kind", kKinds[static_cast<size_t>(tensor.kind)]},
               {"learning_rate_factor", Short(tensor.learning_rate_factor)},
               {"weight_decay_factor", Short(tensor.weight_decay_factor)}};
  if (tensor.group != 0) json["group"] = tensor.group;  // Earlier releases know no groups, and can read what has none.
  return json;
}

absl::StatusOr<TensorSpec> TensorFromJson(const Json& json, size_t number) {
  JsonFields fields(json, absl::StrCat("tensors: ", number, ": "));
  TensorSpec tensor;
  tensor.name = fields.Text("name");
  for (const Json& dimension : fields.List("shape")) {
    const bool fits = dimension.is_number_unsigned() && dimension.get<uint64_t>() <= uint64_t{kMaxModelElements};
    if (!fits) fields.Wrong("shape", "expected numbers, at most 2^36");
    tensor.shape.push_back(fits ? dimension.get<int64_t>() : 1);
  }
  const std::string kind = fields.Text("kind");
  const auto* const found = std::find(std::begin(kKinds), std::end(kKinds), kind);
  if (found == std::end(kKinds)) fields.Wrong("kind", "there is no kind " + kind);
  tensor.kind = static_cast<TensorKind>(found - std::begin(kKinds));
  tensor.learning_rate_factor = fields.Float("learning_rate_factor");
  tensor.weight_decay_factor = fields.Float("weight_decay_factor");
  if (json.is_object() && json.contains("group")) {
    tensor.group = static_cast<uint32_t>(fields.Number("group", std::numeric_limits<uint32_t>::max()));
  }
  PS_RETURN_IF_ERROR(fields.End());
  return tensor;
}

absl::Status ReadTensors(const Json& json, Layout* layout) {
  if (json.size() > kMaxTensors) {
    return InvalidArgument("tensors: there are ", json.size(), ", more than ", kMaxTensors);
  }
  for (const Json& item : json) {
    PS_ASSIGN_OR_RETURN(TensorSpec tensor, TensorFromJson(item, layout->size()));
    layout->push_back(std::move(tensor));
  }
  return Annotate(ValidateLayout(*layout), "tensors");
}

absl::Status ReadShards(const Json& json, std::vector<Manifest::Shard>* shards) {
  if (json.empty()) return absl::InvalidArgumentError("shards: there are none");
  for (const Json& item : json) {
    JsonFields fields(item, absl::StrCat("shards: ", shards->size(), ": "));
    shards->push_back({.version = fields.Number("version"), .checksum = fields.Checksum("checksum")});
    PS_RETURN_IF_ERROR(fields.End());
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t Manifest::version() const {
  uint64_t highest = 0;
  for (const Shard& shard : shards) highest = std::max(highest, shard.version);
  return highest;
}

Json ToJson(const Manifest& manifest) {
  Json tensors = Json::array();
  for (const TensorSpec& tensor : manifest.layout) tensors.push_back(TensorToJson(tensor));
  Json shards = Json::array();
  for (const Manifest::Shard& shard : manifest.shards) {
    shards.push_back({{"version", shard.version}, {"checksum", shard.checksum}});
  }
  return {{"format", kFormat},
          {"job", manifest.job},
          {"generation", manifest.generation},
          {"number", manifest.number},
          {"finished", manifest.finished},
          {"num_workers", manifest.num_workers},
          {"shards", std::move(shards)},
          {"settings", manifest.settings},
          {"state", manifest.state},
          {"tensors", std::move(tensors)}};
}

absl::StatusOr<Manifest> ManifestFromJson(const Json& json) {
  JsonFields fields(json);
  fields.Format(kFormat);
  Manifest manifest;
  manifest.job = fields.Text("job");
  manifest.generation = fields.Number("generation");
  manifest.number = fields.Number("number");
  manifest.finished = fields.Bool("finished");
  manifest.num_workers = static_cast<uint32_t>(fields.Number("num_workers", std::numeric_limits<uint32_t>::max()));
  const Json& shards = fields.List("shards");
  manifest.settings = fields.Texts("settings");
  const Json& state = fields.Object("state");
  const Json& tensors = fields.List("tensors");
  PS_RETURN_IF_ERROR(fields.End());
  PS_RETURN_IF_ERROR(ReadShards(shards, &manifest.shards));
  PS_RETURN_IF_ERROR(ReadTensors(tensors, &manifest.layout));
  manifest.state = state;
  return manifest;
}

std::string ManifestPath(const std::string& folder) { return folder + "/manifest.json"; }

absl::Status WriteManifest(const std::string& folder, const Manifest& manifest) {
  const Json json = ToJson(manifest);
  PS_RETURN_IF_ERROR(Annotate(ManifestFromJson(json).status(), ManifestPath(folder)));
  return WriteCheckedJson(ManifestPath(folder), json).status();
}

absl::StatusOr<Manifest> ReadManifest(const std::string& folder) {
  PS_ASSIGN_OR_RETURN(const CheckedJson checked, ReadCheckedJson(ManifestPath(folder)));
  return Annotate(ManifestFromJson(checked.json), ManifestPath(folder));
}

}  // namespace ps
