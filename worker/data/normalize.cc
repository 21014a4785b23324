#include "worker/data/normalize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr std::array<std::pair<const char*, Normalize>, 4> kNames = {{{"auto", Normalize::kAuto},
                                                                      {"none", Normalize::kNone},
                                                                      {"minmax", Normalize::kMinMax},
                                                                      {"standard", Normalize::kStandard}}};

// What a feature is without normalisation, as Dataset::Gather gives it.
float Value(uint8_t byte) { return static_cast<float>(byte) / 255.0F; }
double Value(double value) { return value; }

template <typename T>
void FindRanges(const std::vector<T>& values, size_t width, ColumnStatistics& stats) {
  for (size_t k = 0; k < width; ++k) stats.low.push_back(Value(values[k]));
  stats.high = stats.low;
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) {
      const double value = Value(values[row + k]);
      stats.low[k] = std::min(stats.low[k], value);
      stats.high[k] = std::max(stats.high[k], value);
    }
  }
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

// Sums, around the means.
template <typename T>
std::vector<double> Squares(const std::vector<T>& values, const std::vector<double>& means) {
  const size_t width = means.size();
  if (width == 0) return {};
  std::vector<double> squares(width);
  for (size_t row = 0; row < values.size(); row += width) {
    for (size_t k = 0; k < width; ++k) {
      const double distance = Value(values[row + k]) - means[k];
      squares[k] += distance * distance;
    }
  }
  return squares;
}

// `values` is [·, width], not empty.
template <typename T>
ColumnStatistics FindColumns(const std::vector<T>& values, size_t width, Normalize kind) {
  ColumnStatistics stats;
  FindRanges(values, width, stats);
  if (kind != Normalize::kStandard) return stats;
  stats.mean = Means(values, width);
  stats.squares = Squares(values, stats.mean);
  return stats;
}

ColumnScaling ColumnsOf(const ColumnStatistics& stats, uint64_t samples, Normalize kind) {
  ColumnScaling columns;
  for (size_t k = 0; k < stats.low.size(); ++k) {
    const double low = stats.low[k];
    const double high = stats.high[k];
    if (low == high) {
      // A rounded mean would leave the only value a little off zero, and that divided by next to nothing.
      columns.offset.push_back(low);
      columns.scale.push_back(1);
    } else if (kind == Normalize::kStandard) {
      columns.offset.push_back(stats.mean[k]);
      columns.scale.push_back(
          std::sqrt(stats.squares[k] / static_cast<double>(samples)));  // The population's standard deviation.
    } else {
      columns.offset.push_back(low);
      columns.scale.push_back(high - low);
    }
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
        return InvalidArgument("sample ", row / width, " has ", what, " ", k, " = ", Value(values[row + k]),
                               ", too far from the training samples to be normalised (offset ", columns.offset[k],
                               ", scale ", columns.scale[k], ")");
      }
      scaled[row + k] = x;
    }
  }
  return absl::OkStatus();
}

constexpr size_t kComparedMax = 4096;  // Values of a column: they are sorted.
constexpr size_t kMergedNotesMax = 3;

// Looks at column k of `values`, [·, width].
void AddMerged(const std::vector<double>& values, size_t width, size_t k, const std::string& what, DataNotes& notes) {
  std::vector<double> column;
  for (size_t at = k; at < values.size() && column.size() < kComparedMax; at += width) column.push_back(values[at]);
  std::sort(column.begin(), column.end());
  column.erase(std::unique(column.begin(), column.end()), column.end());
  size_t merged = 0;
  for (size_t i = 1; i < column.size(); ++i) {
    merged += static_cast<float>(column[i]) == static_cast<float>(column[i - 1]) ? 1 : 0;
  }
  if (100 * merged <= column.size()) return;
  notes.push_back({.warning = true,
                   .text = absl::StrCat(what, " has ", column.size(), " different values, of which ", merged,
                                        " become equal to others as float32; --normalize=standard keeps them apart")});
}

std::string JsonArray(const std::vector<double>& values) {
  std::string text = "[";
  for (const double value : values) absl::StrAppend(&text, text.size() > 1 ? "," : "", ExactText(value));
  return text + "]";
}

}  // namespace

absl::StatusOr<Normalize> ParseNormalize(const std::string& text) {
  for (const auto& [name, kind] : kNames) {
    if (text == name) return kind;
  }
  return InvalidArgument("--normalize=", text, ": expected auto, none, minmax or standard");
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
  metadata["target_offset"] = ExactText(targets.offset[0]);
  metadata["target_scale"] = ExactText(targets.scale[0]);
  return metadata;
}

absl::StatusOr<Statistics> FindStatistics(const DatasetContent& train, Normalize kind, int64_t features_max) {
  Statistics found;
  if (kind == Normalize::kNone) return found;
  if (train.features > features_max) {
    return InvalidArgument("--normalize=", ToString(kind), ": the samples have ", train.features, " features; at most ",
                           features_max, " can be normalised; --normalize=none leaves them unscaled");
  }
  const auto width = static_cast<size_t>(train.features);
  found.features = !train.doubles.empty()  ? FindColumns(train.doubles, width, kind)
                   : !train.floats.empty() ? FindColumns(train.floats, width, kind)
                                           : FindColumns(train.bytes, width, kind);
  if (train.classes > 0) return found;
  found.targets =
      train.double_targets.empty() ? FindColumns(train.targets, 1, kind) : FindColumns(train.double_targets, 1, kind);
  return found;
}

Scaling ScalingOf(const Statistics& statistics, uint64_t samples, Normalize kind) {
  return {.kind = kind,
          .features = ColumnsOf(statistics.features, samples, kind),
          .targets = ColumnsOf(statistics.targets, samples, kind)};
}

absl::StatusOr<Scaling> FindScaling(const DatasetContent& train, Normalize kind) {
  PS_ASSIGN_OR_RETURN(const Statistics found, FindStatistics(train, kind));
  return ScalingOf(found, static_cast<uint64_t>(train.size()), kind);
}

DataNotes FindMerged(const DatasetContent& train) {
  DataNotes notes;
  const auto width = static_cast<size_t>(train.features);
  for (size_t k = 0; k < width && !train.doubles.empty() && notes.size() < kMergedNotesMax; ++k) {
    AddMerged(train.doubles, width, k, absl::StrCat("feature ", k), notes);
  }
  if (!train.double_targets.empty()) AddMerged(train.double_targets, 1, 0, "the target", notes);
  return notes;
}

absl::Status ApplyScaling(const Scaling& scaling, int64_t bytes_max, DatasetContent& content) {
  const auto bytes = static_cast<int64_t>(content.bytes.size());
  if (bytes > bytes_max / static_cast<int64_t>(sizeof(float))) {
    return ResourceExhausted("--normalize=", ToString(scaling.kind), ": ", content.size(), " samples of ",
                             content.features, " bytes become floats, which take more than the limit of ", bytes_max,
                             " bytes");
  }
  if (!content.doubles.empty()) {
    content.floats.resize(content.doubles.size());
    PS_RETURN_IF_ERROR(ScaleColumns(content.doubles, scaling.features, "feature", content.floats.data()));
    content.doubles = std::vector<double>();  // Unlike {}, this gives the memory back.
  } else if (content.bytes.empty()) {
    PS_RETURN_IF_ERROR(ScaleColumns(content.floats, scaling.features, "feature", content.floats.data()));
  } else {
    content.floats.resize(content.bytes.size());
    PS_RETURN_IF_ERROR(ScaleColumns(content.bytes, scaling.features, "feature", content.floats.data()));
    content.bytes = std::vector<uint8_t>();
  }
  if (!content.double_targets.empty()) {
    content.targets.resize(content.double_targets.size());
    PS_RETURN_IF_ERROR(ScaleColumns(content.double_targets, scaling.targets, "target", content.targets.data()));
    content.double_targets = std::vector<double>();
    return absl::OkStatus();
  }
  return ScaleColumns(content.targets, scaling.targets, "target", content.targets.data());
}

}  // namespace ps
