#include "worker/data/normalize.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::array<std::pair<const char*, Normalize>, 4> kNames = {{{"auto", Normalize::kAuto},
                                                                      {"none", Normalize::kNone},
                                                                      {"minmax", Normalize::kMinMax},
                                                                      {"standard", Normalize::kStandard}}};

// What a feature is without normalisation, as Dataset::Gather gives it.
float Value(uint8_t byte) { return static_cast<float>(byte) / 255.0F; }
float Value(float value) { return value; }

// Of each column.
struct Range {
  std::vector<float> low;
  std::vector<float> high;
};

template <typename T>
Range FindRange(const std::vector<T>& values, size_t width) {
  Range range;
  for (size_t k = 0; k < width; ++k) range.low.push_back(Value(values[k]));
  range.high = range.low;
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) {
      range.low[k] = std::min(range.low[k], Value(values[row + k]));
      range.high[k] = std::max(range.high[k], Value(values[row + k]));
    }
  }
  return range;
}

// Row by row, so that each column's sum has one order.
template <typename T>
std::vector<double> Means(const std::vector<T>& values, size_t width) {
  if (width == 0) return {};
  std::vector<double> means(width);
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) means[k] += Value(values[row + k]);
  }
  const size_t rows = values.size() / width;
  for (double& mean : means) mean /= static_cast<double>(rows);
  return means;
}

// Of the population: divided by the number of samples.
template <typename T>
std::vector<double> Deviations(const std::vector<T>& values, const std::vector<double>& means) {
  const size_t width = means.size();
  if (width == 0) return {};
  std::vector<double> squares(width);
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) {
      const double distance = Value(values[row + k]) - means[k];
      squares[k] += distance * distance;
    }
  }
  const size_t rows = values.size() / width;
  for (double& square : squares) square = std::sqrt(square / static_cast<double>(rows));
  return squares;
}

// `values` is [·, width], not empty.
template <typename T>
ColumnScaling FindColumns(const std::vector<T>& values, size_t width, Normalize kind) {
  const Range range = FindRange(values, width);
  ColumnScaling columns;
  if (kind == Normalize::kStandard) {
    columns.offset = Means(values, width);
    columns.scale = Deviations(values, columns.offset);
  } else {
    columns.offset.assign(range.low.begin(), range.low.end());
    for (size_t k = 0; k < width; ++k) columns.scale.push_back(double{range.high[k]} - double{range.low[k]});
  }
  for (size_t k = 0; k < width; ++k) {
    if (range.low[k] < range.high[k]) continue;
    // A rounded mean would leave the only value a little off zero, and that divided by next to nothing.
    columns.offset[k] = range.low[k];
    columns.scale[k] = 1;
  }
  return columns;
}

// `scaled` may be the values themselves. `what` is a column, for the error.
template <typename T>
absl::Status ScaleColumns(const std::vector<T>& values, const ColumnScaling& columns, const char* what, float* scaled) {
  const size_t width = columns.offset.size();
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) {
      const auto x = static_cast<float>((Value(values[row + k]) - columns.offset[k]) / columns.scale[k]);
      if (!std::isfinite(x)) {
        return absl::InvalidArgumentError(absl::StrCat("sample ", row / width, " has ", what, " ", k, " = ",
                                                       Value(values[row + k]),
                                                       ", too far from the training samples to be normalised (offset ",
                                                       columns.offset[k], ", scale ", columns.scale[k], ")"));
      }
      scaled[row + k] = x;
    }
  }
  return absl::OkStatus();
}

std::string Shortest(double value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::string JsonArray(const std::vector<double>& values) {
  std::string text = "[";
  for (const double value : values) absl::StrAppend(&text, text.size() > 1 ? "," : "", Shortest(value));
  return text + "]";
}

}  // namespace

absl::StatusOr<Normalize> ParseNormalize(const std::string& text) {
  for (const auto& [name, kind] : kNames) {
    if (text == name) return kind;
  }
  return absl::InvalidArgumentError(absl::StrCat("--normalize=", text, ": expected auto, none, minmax or standard"));
}

std::string ToString(Normalize kind) {
  for (const auto& [name, known] : kNames) {
    if (kind == known) return name;
  }
  return "";
}

std::map<std::string, std::string> Scaling::Metadata() const {
  std::map<std::string, std::string> metadata = {{"normalize", ToString(kind)}};
  if (kind == Normalize::kNone) return metadata;
  metadata["feature_offset"] = JsonArray(features.offset);
  metadata["feature_scale"] = JsonArray(features.scale);
  if (targets.offset.empty()) return metadata;
  metadata["target_offset"] = Shortest(targets.offset[0]);
  metadata["target_scale"] = Shortest(targets.scale[0]);
  return metadata;
}

absl::StatusOr<Scaling> FindScaling(const DatasetContent& train, Normalize kind) {
  if (train.features > kNormalizedFeaturesMax) {
    return absl::InvalidArgumentError(absl::StrCat("--normalize=", ToString(kind), ": the samples have ",
                                                   train.features, " features; at most ", kNormalizedFeaturesMax,
                                                   " can be normalised; --normalize=none leaves them unscaled"));
  }
  Scaling scaling = {.kind = kind};
  const auto width = static_cast<size_t>(train.features);
  scaling.features =
      train.bytes.empty() ? FindColumns(train.floats, width, kind) : FindColumns(train.bytes, width, kind);
  if (train.classes == 0) scaling.targets = FindColumns(train.targets, 1, kind);
  return scaling;
}

absl::Status ApplyScaling(const Scaling& scaling, int64_t bytes_max, DatasetContent& content) {
  const auto bytes = static_cast<int64_t>(content.bytes.size());
  if (bytes > bytes_max / static_cast<int64_t>(sizeof(float))) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--normalize=", ToString(scaling.kind), ": ", content.size(), " samples of ", content.features,
                     " bytes become floats, which take more than the limit of ", bytes_max, " bytes"));
  }
  if (content.bytes.empty()) {
    PS_RETURN_IF_ERROR(ScaleColumns(content.floats, scaling.features, "feature", content.floats.data()));
  } else {
    content.floats.resize(content.bytes.size());
    PS_RETURN_IF_ERROR(ScaleColumns(content.bytes, scaling.features, "feature", content.floats.data()));
    content.bytes = {};
  }
  return ScaleColumns(content.targets, scaling.targets, "target", content.targets.data());
}

}  // namespace ps
