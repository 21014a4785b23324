#include "worker/initial_weights.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/hash.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace ps {

absl::StatusOr<Values> ReadInitialWeights(const std::string& path, const Layout& layout) {
  if (path.empty()) return Values();
  absl::StatusOr<std::vector<NamedTensor>> file = ReadSafetensors(path);
  if (!file.ok()) return Annotate(file.status(), "--init_weights");
  Values values;
  for (const TensorSpec& spec : layout) {
    const auto found =
        std::find_if(file->begin(), file->end(), [&](const NamedTensor& tensor) { return tensor.spec == spec; });
    if (found == file->end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--init_weights=", path, ": the model's tensor ", ToString(spec), " is not in it"));
    }
    values.push_back(std::move(found->values));
  }
  return values;
}

std::string Fingerprint(const Values& values) {
  std::vector<SliceHash> hashes;
  hashes.reserve(values.size());
  for (const std::vector<float>& tensor : values) hashes.push_back(HashSlice(tensor));
  return WeightsHash(hashes);
}

}  // namespace ps
