#include "common/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>
#include "common/files.h"
#include "common/half_floats.h"
#include "common/simd.h"
#include "common/slices.h"
#include "common/status.h"
#include "common/wire_type.h"

namespace ps {
namespace {

// Whose objects find a name by going through all: each is looked up in `SortedJson`, and none while one is written.
using OrderedJson = nlohmann::ordered_json;
using SortedJson = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100 << 20;  // The reference implementation's limit.

// The bytes of an element, for each type whose elements are whole bytes.
constexpr std::array<std::pair<const char*, uint64_t>, 15> kTypes = {{{"F32", 4},
                                                                      {"F64", 8},
                                                                      {"F16", 2},
                                                                      {"BF16", 2},
                                                                      {"I64", 8},
                                                                      {"U64", 8},
                                                                      {"I32", 4},
                                                                      {"U32", 4},
                                                                      {"I16", 2},
                                                                      {"U16", 2},
                                                                      {"I8", 1},
                                                                      {"U8", 1},
                                                                      {"BOOL", 1},
                                                                      {"F8_E4M3", 1},
                                                                      {"F8_E5M2", 1}}};

// Nothing of a type that is not known here.
std::optional<uint64_t> BytesOf(const std::string& type) {
  for (const auto& [name, bytes] : kTypes) {
    if (type == name) return bytes;
  }
  return std::nullopt;
}

struct Entry {
  TensorSpec spec;
  std::string type;
  uint64_t begin = 0;
  uint64_t end = 0;
};

bool IsNumbers(const SortedJson& value) {
  return value.is_array() &&
         std::all_of(value.begin(), value.end(), [](const SortedJson& x) { return x.is_number_unsigned(); });
}

absl::StatusOr<Entry> ParseEntry(const std::string& name, const SortedJson& value) {
  const auto wrong = [&](const std::string& what) { return InvalidArgument("tensor ", name, ": ", what); };
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() || !value.contains("shape") ||
      !value.contains("data_offsets") || !IsNumbers(value["shape"]) || !IsNumbers(value["data_offsets"]) ||
      value["data_offsets"].size() != 2) {
    return wrong("expected dtype, shape and data_offsets");
  }
  Entry entry;
  entry.type = value["dtype"].get<std::string>();
  entry.spec.name = name;
  uint64_t elements = 1;
  for (const SortedJson& item : value["shape"]) {
    const auto dimension = item.get<uint64_t>();
    const auto most = static_cast<uint64_t>(kMaxModelElements) / std::max<uint64_t>(elements, 1);
    if (dimension > most) return wrong("bad shape");
    elements *= dimension;
    entry.spec.shape.push_back(static_cast<int64_t>(dimension));
  }
  entry.begin = value["data_offsets"][0].get<uint64_t>();
  entry.end = value["data_offsets"][1].get<uint64_t>();
  const std::optional<uint64_t> bytes = BytesOf(entry.type);
  if (entry.end < entry.begin || (bytes.has_value() && entry.end - entry.begin != elements * *bytes)) {
    return wrong("data_offsets do not fit the shape");
  }
  return entry;
}

// The texts among them.
std::map<std::string, std::string> ParseMetadata(const SortedJson& value) {
  std::map<std::string, std::string> metadata;
  if (!value.is_object()) return metadata;
  for (const auto& item : value.items()) {
    if (item.value().is_string()) metadata[item.key()] = item.value().get<std::string>();
  }
  return metadata;
}

absl::StatusOr<std::vector<Entry>> ParseHeader(const std::string& text, uint64_t data_bytes,
                                               std::map<std::string, std::string>* metadata) {
  const SortedJson header = SortedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) return absl::InvalidArgumentError("the header is not a JSON object");
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataName) {
      *metadata = ParseMetadata(value);
      continue;
    }
    PS_ASSIGN_OR_RETURN(Entry entry, ParseEntry(name, value));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);  // What is empty comes before what begins there.
  });
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at) return InvalidArgument("tensor ", entry.spec.name, ": its data overlaps or leaves a gap");
    at = entry.end;
  }
  if (at != data_bytes) return InvalidArgument("truncated, or too long: ", data_bytes, " bytes of data, expected ", at);
  return entries;
}

constexpr size_t kConvertedElements = size_t{1} << 16;  // One step converts no more.

// `bytes` are as many elements of this type, F64, F16 or BF16.
void Convert(const char* bytes, const std::string& type, std::span<float> values) {
  if (type != "F64") {
    const WireType half = type == "F16" ? WireType::kFloat16 : WireType::kBfloat16;
    return WidenHalf(reinterpret_cast<const uint8_t*>(bytes), values.size(), half, values.data(), BestIsa());
  }
  for (float& value : values) {
    double wide = 0;
    std::memcpy(&wide, bytes, sizeof(wide));
    bytes += sizeof(wide);
    value = static_cast<float>(wide);
  }
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  PS_ASSIGN_OR_RETURN(OpenFile opened, OpenFile::Open(path));
  SafetensorsFile file(std::move(opened));
  const uint64_t size = file.bytes();
  const absl::Status no_such_file = absl::InvalidArgumentError(path + ": not a safetensors file, or truncated");
  uint64_t header_bytes = 0;
  if (size < sizeof(header_bytes)) return no_such_file;
  PS_RETURN_IF_ERROR(file.file_.Read(0, {reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes)}));
  if (header_bytes > kMaxHeaderBytes || header_bytes > size - sizeof(header_bytes)) return no_such_file;
  std::string text(header_bytes, '\0');
  PS_RETURN_IF_ERROR(file.file_.Read(sizeof(header_bytes), text));
  const uint64_t data = sizeof(header_bytes) + header_bytes;
  PS_ASSIGN_OR_RETURN(std::vector<Entry> entries, Annotate(ParseHeader(text, size - data, &file.metadata_), path));
  for (Entry& entry : entries) {
    file.begins_.push_back(data + entry.begin);
    file.tensors_.push_back(std::move(entry.spec));
    file.types_.push_back(std::move(entry.type));
  }
  return file;
}

absl::Status SafetensorsFile::Read(size_t i, int64_t first, std::span<float> values) const {
  const std::string& type = types_[i];
  if (type == "F32") {
    const uint64_t at = begins_[i] + static_cast<uint64_t>(first) * sizeof(float);
    return file_.Read(at, {reinterpret_cast<char*>(values.data()), values.size_bytes()});
  }
  if (type != "F64" && type != "F16" && type != "BF16") {
    return InvalidArgument(path(), ": tensor ", tensors_[i].name, ": dtype ", type, ", expected F32, F64, F16 or BF16");
  }
  const size_t element = type == "F64" ? sizeof(double) : sizeof(uint16_t);
  std::vector<char> buffer(std::min(values.size(), kConvertedElements) * element);
  uint64_t at = begins_[i] + static_cast<uint64_t>(first) * element;
  while (!values.empty()) {
    const size_t count = std::min(values.size(), kConvertedElements);
    PS_RETURN_IF_ERROR(file_.Read(at, {buffer.data(), count * element}));
    Convert(buffer.data(), type, values.first(count));
    values = values.subspan(count);
    at += count * element;
  }
  return absl::OkStatus();
}

std::string SafetensorsHeader(const std::vector<TensorSpec>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  OrderedJson::object_t header;
  header.reserve(tensors.size() + 1);
  if (!metadata.empty()) header.push_back({std::string(kMetadataName), metadata});
  uint64_t at = 0;
  for (const TensorSpec& tensor : tensors) {
    const uint64_t end = at + static_cast<uint64_t>(tensor.elements()) * sizeof(float);
    header.push_back({tensor.name, {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {at, end}}}});
    at = end;
  }
  std::string text = OrderedJson(std::move(header)).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = text.size();
  return std::string(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes)) + text;
}

absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const TensorView& tensor : tensors) specs.push_back(tensor.spec);
  const std::string header = SafetensorsHeader(specs, metadata);
  std::vector<std::span<const char>> parts = {header};
  for (const TensorView& tensor : tensors) {
    parts.emplace_back(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size_bytes());
  }
  return WriteFileAtomically(path, parts);
}

}  // namespace ps
