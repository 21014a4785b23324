#include "worker/initial_weights.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/checkpoint/stored_weights.h"
#include "common/hash.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {
namespace {

// The number of each tensor of `wanted` among those that `path` has.
absl::StatusOr<std::vector<uint32_t>> FindTensors(const std::string& path, const Layout& there, const Layout& wanted) {
  std::vector<uint32_t> numbers;
  for (const TensorSpec& spec : wanted) {
    const auto found =
        std::find_if(there.begin(), there.end(), [&](const auto& other) { return other.name == spec.name; });
    if (found == there.end() || found->shape != spec.shape) {
      const std::string instead = found == there.end() ? "" : ", but " + ToString(*found);
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": the model's tensor ", ToString(spec), " is not in it", instead));
    }
    numbers.push_back(static_cast<uint32_t>(found - there.begin()));
  }
  return numbers;
}

absl::StatusOr<InitialWeights> ReadCheckpoint(const std::string& path, const Layout& layout) {
  absl::StatusOr<StoredWeights> found = ReadStoredWeights(path, [&layout](const StoredCheckpoint& stored) {
    return FindTensors(stored.folder, stored.manifest.layout, layout);
  });
  if (!found.ok()) return Annotate(found.status(), "--init_weights");
  return InitialWeights{.values = std::move(found->values),
                        .source = found->checkpoint.folder,
                        .version = found->checkpoint.manifest.version()};
}

absl::StatusOr<InitialWeights> ReadFile(const std::string& path, const Layout& layout) {
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
  if (!file.ok()) return Annotate(file.status(), "--init_weights");
  const auto numbers = FindTensors(path, file->tensors(), layout);
  if (!numbers.ok()) return Annotate(numbers.status(), "--init_weights");
  InitialWeights weights = {.values = {}, .source = path};
  for (size_t i = 0; i < layout.size(); ++i) {
    std::vector<float>& values = weights.values.emplace_back(static_cast<size_t>(layout[i].elements()));
    PS_RETURN_IF_ERROR(Annotate(file->Read((*numbers)[i], 0, values), "--init_weights"));
  }
  const auto version = file->metadata().find("version");
  const bool told = version != file->metadata().end();
  if (told && !absl::SimpleAtoi(version->second, &weights.version)) weights.version = 0;
  return weights;
}

}  // namespace

absl::StatusOr<InitialWeights> ReadInitialWeights(const std::string& path, const Layout& layout) {
  if (path.empty()) return InitialWeights();
  std::error_code error;
  return std::filesystem::is_directory(path, error) ? ReadCheckpoint(path, layout) : ReadFile(path, layout);
}

std::string Fingerprint(const Values& values) {
  std::vector<SliceHash> hashes;
  hashes.reserve(values.size());
  for (const std::vector<float>& tensor : values) hashes.push_back(HashSlice(tensor));
  return WeightsHash(hashes);
}

}  // namespace ps
