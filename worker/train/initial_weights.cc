#include "worker/train/initial_weights.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/stored_weights.h"
#include "common/hash.h"
#include "common/safetensors.h"
#include "common/simd.h"
#include "common/status.h"

namespace ps {
namespace {

// The sign of NaN says nothing.
std::string Text(double value) { return std::isnan(value) ? "nan" : absl::StrCat(value); }

// INVALID_ARGUMENT, naming the tensor and the element, if any of the values is infinite or no number.
absl::Status CheckFinite(const Layout& layout, const ConstTensors& weights) {
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    const std::span<const float> values = weights[tensor];
    if (AllFinite(values.data(), values.size(), BestIsa())) continue;
    const auto bad = std::find_if_not(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
    return InvalidArgument("tensor ", ToString(layout[tensor]), ": element ", bad - values.begin(), " is ", Text(*bad),
                           "; expected finite numbers within float32");
  }
  return absl::OkStatus();
}

// The number of each tensor of `wanted` among those that `path` has.
absl::StatusOr<std::vector<uint32_t>> FindTensors(const std::string& path, const Layout& there, const Layout& wanted) {
  std::vector<uint32_t> numbers;
  for (const TensorSpec& spec : wanted) {
    const auto found =
        std::find_if(there.begin(), there.end(), [&](const auto& other) { return other.name == spec.name; });
    if (found == there.end() || found->shape != spec.shape) {
      const std::string instead = found == there.end() ? "" : ", but " + ToString(*found);
      return InvalidArgument(path, ": the model's tensor ", ToString(spec), " is not in it", instead);
    }
    numbers.push_back(static_cast<uint32_t>(found - there.begin()));
  }
  return numbers;
}

constexpr size_t kToldMax = 8;  // Tensors in one line.

// "a, b and 3 more".
std::string Told(const std::vector<std::string>& names) {
  const size_t told = std::min(names.size(), kToldMax);
  const std::string text = absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(told), ", ");
  return names.size() == told ? text : absl::StrCat(text, " and ", names.size() - told, " more");
}

void NoteUnwanted(const std::string& path, const Layout& there, const std::vector<uint32_t>& wanted,
                  std::vector<std::string>& notes) {
  const std::set<uint32_t> taken(wanted.begin(), wanted.end());
  std::vector<std::string> unwanted;
  for (uint32_t i = 0; i < there.size(); ++i) {
    if (!taken.contains(i)) unwanted.push_back(ToString(there[i]));
  }
  if (unwanted.empty()) return;
  notes.push_back(absl::StrCat("--init_weights: ", path, ": the model has no tensor ", Told(unwanted), "; left out"));
}

// How many tensors of which type become float32.
void NoteConverted(const SafetensorsFile& file, const std::vector<uint32_t>& wanted, std::vector<std::string>& notes) {
  std::map<std::string, int> counts;
  for (const uint32_t number : wanted) {
    if (file.type(number) != "F32") ++counts[file.type(number)];
  }
  for (const auto& [type, count] : counts) {
    notes.push_back(absl::StrCat("--init_weights: ", file.path(), ": converted from ", type, " to float32: ", count,
                                 count == 1 ? " tensor" : " tensors"));
  }
}

absl::Status CheckValues(const std::string& path, const Layout& layout, const Values& values) {
  return Annotate(CheckFinite(layout, ConstTensors(values.begin(), values.end())),
                  absl::StrCat("--init_weights: ", path));
}

absl::StatusOr<InitialWeights> ReadCheckpoint(const std::string& path, const Layout& layout) {
  const auto wanted = [&layout](const StoredCheckpoint& stored) {
    return FindTensors(stored.folder, stored.manifest.layout, layout);
  };
  PS_ASSIGN_OR_RETURN(StoredWeights found, Annotate(ReadStoredWeights(path, wanted), "--init_weights"));
  const StoredCheckpoint& stored = found.checkpoint;
  InitialWeights weights = {
      .values = std::move(found.values), .source = stored.folder, .version = stored.manifest.version()};
  const auto numbers = FindTensors(stored.folder, stored.manifest.layout, layout);
  if (numbers.ok()) NoteUnwanted(stored.folder, stored.manifest.layout, *numbers, weights.notes);
  PS_RETURN_IF_ERROR(CheckValues(stored.folder, layout, weights.values));
  return weights;
}

absl::StatusOr<InitialWeights> ReadFile(const std::string& path, const Layout& layout) {
  PS_ASSIGN_OR_RETURN(const SafetensorsFile file, Annotate(SafetensorsFile::Open(path), "--init_weights"));
  PS_ASSIGN_OR_RETURN(const auto numbers, Annotate(FindTensors(path, file.tensors(), layout), "--init_weights"));
  InitialWeights weights = {.values = {}, .source = path};
  for (size_t i = 0; i < layout.size(); ++i) {
    std::vector<float>& values = weights.values.emplace_back(static_cast<size_t>(layout[i].elements()));
    PS_RETURN_IF_ERROR(Annotate(file.Read(numbers[i], 0, values), "--init_weights"));
  }
  PS_RETURN_IF_ERROR(CheckValues(path, layout, weights.values));
  NoteConverted(file, numbers, weights.notes);
  NoteUnwanted(path, file.tensors(), numbers, weights.notes);
  weights.metadata = file.metadata();
  const auto version = file.metadata().find("version");
  const bool told = version != file.metadata().end();
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

absl::Status CheckOutcome(double value, const std::string& what, const Layout& layout, const ConstTensors& weights) {
  if (std::isfinite(value)) return absl::OkStatus();
  const std::string found = absl::StrCat(what, " is ", Text(value));
  if (const absl::Status finite = CheckFinite(layout, weights); !finite.ok()) {
    return absl::OutOfRangeError(absl::StrCat(found, ": ", Message(finite)));
  }
  float largest = 0;
  size_t where = 0;
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    for (const float weight : weights[tensor]) {
      if (std::abs(weight) <= largest) continue;
      largest = std::abs(weight);
      where = tensor;
    }
  }
  return absl::OutOfRangeError(
      absl::StrCat(found, ": the weights are finite, but too large for their outputs to be; the ", "largest is ",
                   largest, ", in tensor ", ToString(layout[where]), " (is the learning rate too high?)"));
}

}  // namespace ps
