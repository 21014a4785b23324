#include "common/checkpoint/shard_file.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/status.h"

namespace ps {
namespace {

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

std::string Checksum(std::span<const float> values) {
  RunningHash hash;
  hash.Add(Bytes(values));
  return hash.Hex();
}

StoredPart Describe(const ShardPart& part, const Layout& layout, std::set<std::string>* used) {
  const auto elements = static_cast<int64_t>(part.weights.size());
  const std::string name = PartName(layout[part.tensor], part.first, elements);
  StoredPart stored = {.tensor = part.tensor,
                       .first = part.first,
                       .elements = elements,
                       .skipped = part.skipped,
                       .weights = {.name = WeightsName(layout[part.tensor], part.first, elements, used),
                                   .checksum = Checksum(part.weights)},
                       .state = {}};
  for (size_t k = 0; k < part.state.size(); ++k) {
    stored.state.push_back(
        {.name = Unused(absl::StrCat(name, ".state", k), used), .checksum = Checksum(part.state[k])});
  }
  return stored;
}

// Of everything that the record names, in the order of the file.
std::vector<TensorSpec> Contents(const ShardRecord& record, const Layout& layout) {
  std::vector<TensorSpec> contents;
  for (const StoredPart& part : record.parts) {
    const std::vector<int64_t> shape = ShapeOf(layout[part.tensor], part.first, part.elements);
    contents.push_back({.name = part.weights.name, .shape = shape});
    for (const StoredPart::Values& state : part.state) contents.push_back({.name = state.name, .shape = shape});
  }
  return contents;
}

}  // namespace

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

}  // namespace ps
