#include "worker/data/dataset.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/simd.h"
#include "common/status.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

absl::Status CheckSizes(const DatasetContent& content) {
  if (content.features < 1 || content.features > kFeaturesMax) {
    return InvalidArgument("a sample has ", content.features, " features; expected 1 to ", kFeaturesMax);
  }
  if (content.classes < 0 || content.classes > kClassesMax) {
    return InvalidArgument("there are ", content.classes, " classes; expected 0 (regression) to ", kClassesMax);
  }
  if (!content.class_labels.empty() && content.class_labels.size() != static_cast<size_t>(content.classes)) {
    return InvalidArgument("there are labels for ", content.class_labels.size(), " classes; expected ",
                           content.classes);
  }
  const int64_t size = content.size();
  if (size > kSamplesMax) return InvalidArgument("there are ", size, " samples; the limit is ", kSamplesMax);
  const bool targets = !content.targets.empty() || !content.double_targets.empty();
  if (content.classes > 0 ? targets : !content.labels.empty()) {
    return absl::InvalidArgumentError("there are both labels and targets; expected labels for classification only");
  }
  if (!content.bytes.empty() + !content.floats.empty() + !content.doubles.empty() > 1) {
    return absl::InvalidArgumentError("there are both byte and float features; expected one kind");
  }
  const auto values = static_cast<int64_t>(content.bytes.size() + content.floats.size() + content.doubles.size());
  if (values != size * content.features) {
    return InvalidArgument("there are ", values, " feature values; expected ", size, " samples of ", content.features);
  }
  return absl::OkStatus();
}

// A sample has so many `features`; 0 says that these are targets.
template <typename T>
absl::Status CheckFinite(const std::vector<T>& values, int64_t features) {
  if (std::is_same_v<T, float> && AllFinite(values.data(), values.size(), BestIsa())) return absl::OkStatus();
  const auto bad = std::find_if_not(values.begin(), values.end(), [](T x) { return std::isfinite(x); });
  if (bad == values.end()) return absl::OkStatus();
  const int64_t at = bad - values.begin();
  const std::string what = features == 0
                               ? absl::StrCat("sample ", at, " has target ")
                               : absl::StrCat("sample ", at / features, " has feature ", at % features, " = ");
  return InvalidArgument(what, *bad, "; expected a finite number");
}

absl::Status CheckValues(const DatasetContent& content) {
  for (size_t i = 0; i < content.labels.size(); ++i) {
    if (content.labels[i] < 0 || content.labels[i] >= content.classes) {
      return InvalidArgument("sample ", i, " has label ", content.labels[i], "; expected 0 to ", content.classes - 1);
    }
  }
  PS_RETURN_IF_ERROR(CheckFinite(content.doubles, content.features));
  PS_RETURN_IF_ERROR(CheckFinite(content.double_targets, 0));
  PS_RETURN_IF_ERROR(CheckFinite(content.floats, content.features));
  return CheckFinite(content.targets, 0);
}

template <typename T>
std::vector<T> SelectRows(const std::vector<T>& values, std::span<const int32_t> indices, int64_t width) {
  std::vector<T> selected;
  if (values.empty()) return selected;
  selected.reserve(indices.size() * static_cast<size_t>(width));
  for (const int32_t index : indices) {
    const auto row = values.begin() + index * width;
    selected.insert(selected.end(), row, row + width);
  }
  return selected;
}

}  // namespace

void RoundToFloats(DatasetContent& content) {
  const auto round = [](std::vector<double>& values, std::vector<float>& rounded) {
    if (values.empty()) return;
    rounded.resize(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(), [](double x) { return static_cast<float>(x); });
    values = std::vector<double>();  // Unlike {}, this gives the memory back.
  };
  round(content.doubles, content.floats);
  round(content.double_targets, content.targets);
}

absl::Status Check(const DatasetContent& content) {
  PS_RETURN_IF_ERROR(CheckSizes(content));
  return CheckValues(content);
}

uint64_t Fingerprint(const DatasetContent& content) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const auto add = [&](const void* data, size_t size) {
    // An empty vector's data may be null, which xxHash does not take.
    if (size > 0) XXH3_64bits_update(state.get(), data, size);
  };
  const int64_t width = !content.doubles.empty() ? 8 : content.floats.empty() ? 1 : 4;
  const int64_t shape[] = {content.size(), content.features, content.classes, width};
  add(&shape[0], sizeof(shape));
  add(content.bytes.data(), content.bytes.size());
  add(content.floats.data(), content.floats.size() * sizeof(float));
  add(content.doubles.data(), content.doubles.size() * sizeof(double));
  add(content.labels.data(), content.labels.size() * sizeof(int32_t));
  add(content.targets.data(), content.targets.size() * sizeof(float));
  add(content.double_targets.data(), content.double_targets.size() * sizeof(double));
  // There are none where class k is called k, so that these have the hash that they had before classes had names.
  add(content.class_labels.data(), content.class_labels.size() * sizeof(double));
  return XXH3_64bits_digest(state.get());
}

DatasetContent Select(const DatasetContent& content, std::span<const int32_t> indices) {
  return {.features = content.features,
          .classes = content.classes,
          .rows = content.rows,
          .columns = content.columns,
          .bytes = SelectRows(content.bytes, indices, content.features),
          .floats = SelectRows(content.floats, indices, content.features),
          .doubles = SelectRows(content.doubles, indices, content.features),
          .labels = SelectRows(content.labels, indices, 1),
          .targets = SelectRows(content.targets, indices, 1),
          .double_targets = SelectRows(content.double_targets, indices, 1),
          .class_labels = content.class_labels,
          .first_index = content.first_index};
}

Dataset::Dataset() : Dataset(DatasetContent{}) {}

Dataset::Dataset(DatasetContent content) : content_(std::make_shared<const DatasetContent>(std::move(content))) {}

absl::StatusOr<Dataset> Dataset::Create(DatasetContent content) {
  RoundToFloats(content);
  PS_RETURN_IF_ERROR(Check(content));
  return Dataset(std::move(content));
}

void Dataset::Gather(std::span<const int32_t> indices, float* features, int32_t* labels) const {
  const auto count = static_cast<int64_t>(indices.size());
  if (!content_->bytes.empty()) {
    GatherRows(content_->bytes.data(), indices.data(), count, content_->features, features);
  } else {
    GatherRows(content_->floats.data(), indices.data(), count, content_->features, features);
  }
  if (labels == nullptr) return;
  for (const int32_t index : indices) *labels++ = content_->labels[static_cast<size_t>(index)];
}

void Dataset::GatherTargets(std::span<const int32_t> indices, float* targets) const {
  for (const int32_t index : indices) *targets++ = content_->targets[static_cast<size_t>(index)];
}

std::string ToString(const Dataset& dataset) {
  std::string text = absl::StrCat(dataset.size(), " samples of ", dataset.features(),
                                  dataset.floats().empty() ? " bytes, " : " floats, ");
  if (dataset.classes() == 0) return text + "regression";
  return absl::StrCat(text, dataset.classes(), " classes");
}

}  // namespace ps
