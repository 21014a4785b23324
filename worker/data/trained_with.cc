#include "worker/data/trained_with.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <nlohmann/json.hpp>
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kToldLabelsMax = 12;

using Metadata = std::map<std::string, std::string>;

absl::Status WrongEntry(const Metadata& metadata, const std::string& name, const std::string& expected) {
  const auto found = metadata.find(name);
  return InvalidArgument("metadata ", name, found == metadata.end() ? ": is missing; expected " : ": expected ",
                         expected);
}

// The finite numbers of a JSON array. Nothing if it is no such thing.
std::optional<std::vector<double>> Numbers(const Metadata& metadata, const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) return std::nullopt;
  const nlohmann::json array = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
  if (!array.is_array()) return std::nullopt;
  std::vector<double> numbers;
  for (const nlohmann::json& item : array) {
    if (!item.is_number() || !std::isfinite(item.get<double>())) return std::nullopt;
    numbers.push_back(item.get<double>());
  }
  return numbers;
}

bool AllAboveZero(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return value > 0; });
}

absl::StatusOr<ColumnScaling> ParseFeatures(const Metadata& metadata) {
  std::optional<std::vector<double>> offset = Numbers(metadata, "feature_offset");
  if (!offset.has_value() || offset->empty()) return WrongEntry(metadata, "feature_offset", "an array of numbers");
  std::optional<std::vector<double>> scale = Numbers(metadata, "feature_scale");
  if (!scale.has_value() || !AllAboveZero(*scale)) {
    return WrongEntry(metadata, "feature_scale", "an array of numbers above 0");
  }
  if (scale->size() != offset->size()) {
    return InvalidArgument("metadata feature_offset and feature_scale: have ", offset->size(), " and ", scale->size(),
                           " numbers; expected as many");
  }
  return ColumnScaling{.offset = *std::move(offset), .scale = *std::move(scale)};
}

absl::StatusOr<ColumnScaling> ParseTargets(const Metadata& metadata) {
  const auto offset = metadata.find("target_offset");
  const auto scale = metadata.find("target_scale");
  if (offset == metadata.end() && scale == metadata.end()) return ColumnScaling();
  ColumnScaling targets = {.offset = {0}, .scale = {0}};
  if (offset == metadata.end() || !absl::SimpleAtod(offset->second, &targets.offset[0]) ||
      !std::isfinite(targets.offset[0])) {
    return WrongEntry(metadata, "target_offset", "a number");
  }
  if (scale == metadata.end() || !absl::SimpleAtod(scale->second, &targets.scale[0]) ||
      !std::isfinite(targets.scale[0]) || targets.scale[0] <= 0) {
    return WrongEntry(metadata, "target_scale", "a number above 0");
  }
  return targets;
}

absl::StatusOr<std::optional<Scaling>> ParseScaling(const Metadata& metadata) {
  const auto kind = metadata.find("normalize");
  if (kind == metadata.end()) return std::optional<Scaling>();
  const absl::StatusOr<Normalize> parsed = ParseNormalize(kind->second);
  if (!parsed.ok() || *parsed == Normalize::kAuto) return WrongEntry(metadata, "normalize", "none, minmax or standard");
  Scaling scaling = {.kind = *parsed};
  if (scaling.kind == Normalize::kNone) return std::optional(std::move(scaling));
  PS_ASSIGN_OR_RETURN(scaling.features, ParseFeatures(metadata));
  PS_ASSIGN_OR_RETURN(scaling.targets, ParseTargets(metadata));
  return std::optional(std::move(scaling));
}

bool AreLabels(const std::vector<double>& labels) {
  const bool integers = std::all_of(labels.begin(), labels.end(), [](double x) {
    return x == std::floor(x) && std::abs(x) <= std::numeric_limits<int32_t>::max();
  });
  return integers && !labels.empty() && labels.size() <= static_cast<size_t>(kClassesMax) &&
         std::adjacent_find(labels.begin(), labels.end(), std::greater_equal<>()) == labels.end();
}

void BecomeRegression(DatasetContent& content) {
  const std::vector<double> labels = ClassLabels(content.classes, content.class_labels);
  content.double_targets.reserve(content.labels.size());
  for (const int32_t label : content.labels) content.double_targets.push_back(labels[static_cast<size_t>(label)]);
  content.labels = {};
  content.class_labels = {};
  content.classes = 0;
}

}  // namespace

std::vector<double> ClassLabels(int32_t classes, const std::vector<double>& names) {
  if (!names.empty()) return names;
  std::vector<double> labels(static_cast<size_t>(classes));
  std::iota(labels.begin(), labels.end(), 0.0);
  return labels;
}

std::string ToString(const std::vector<double>& class_labels) {
  const size_t told = std::min(class_labels.size(), kToldLabelsMax);
  std::vector<int64_t> some;
  for (size_t i = 0; i < told; ++i) some.push_back(static_cast<int64_t>(class_labels[i]));
  const std::string text = absl::StrJoin(some, ", ");
  return class_labels.size() == told ? text : absl::StrCat(text, " and ", class_labels.size() - told, " more");
}

std::map<std::string, std::string> DataMetadata(const Scaling& scaling, const Dataset& train) {
  Metadata metadata = scaling.Metadata();
  if (train.first_index().has_value()) metadata["zero_based"] = *train.first_index() == 0 ? "yes" : "no";
  if (train.classes() == 0) return metadata;
  const std::vector<double> names = ClassLabels(train.classes(), train.class_labels());
  const std::vector<int64_t> labels(names.begin(), names.end());
  metadata["class_labels"] = absl::StrCat("[", absl::StrJoin(labels, ","), "]");
  return metadata;
}

absl::StatusOr<TrainedWith> ParseDataMetadata(const std::map<std::string, std::string>& metadata) {
  TrainedWith model;
  PS_ASSIGN_OR_RETURN(model.scaling, ParseScaling(metadata));
  const auto zero_based = metadata.find("zero_based");
  if (zero_based != metadata.end()) {
    if (zero_based->second != "yes" && zero_based->second != "no") {
      return WrongEntry(metadata, "zero_based", "yes or no");
    }
    model.first_index = zero_based->second == "yes" ? 0 : 1;
  }
  if (!metadata.contains("class_labels")) return model;
  std::optional<std::vector<double>> labels = Numbers(metadata, "class_labels");
  if (!labels.has_value() || !AreLabels(*labels)) {
    return WrongEntry(metadata, "class_labels", "an array of ascending integers");
  }
  model.class_labels = *std::move(labels);
  return model;
}

absl::Status TakeClassesOf(const TrainedWith& model, DatasetContent& content) {
  const bool targets = model.scaling.has_value() && !model.scaling->targets.scale.empty();
  if (targets && content.classes > 0) BecomeRegression(content);
  if (model.class_labels.empty() || content.size() == 0) return absl::OkStatus();
  if (content.classes == 0) {
    return InvalidArgument("its labels are not all integers, but the model was trained on the ", "labels ",
                           ToString(model.class_labels));
  }
  std::vector<int32_t> numbers;  // In the model, of each class here; -1: it has no such.
  const std::vector<double> labels = ClassLabels(content.classes, content.class_labels);
  for (const double label : labels) {
    const auto found = std::lower_bound(model.class_labels.begin(), model.class_labels.end(), label);
    const bool known = found != model.class_labels.end() && *found == label;
    numbers.push_back(known ? static_cast<int32_t>(found - model.class_labels.begin()) : -1);
  }
  for (size_t i = 0; i < content.labels.size(); ++i) {
    const auto own = static_cast<size_t>(content.labels[i]);
    if (numbers[own] < 0) {
      return InvalidArgument("sample ", i, " has label ", static_cast<int64_t>(labels[own]),
                             "; the model was trained on the labels ", ToString(model.class_labels));
    }
    content.labels[i] = numbers[own];
  }
  content.classes = static_cast<int32_t>(model.class_labels.size());
  const bool named = model.class_labels != ClassLabels(content.classes, {});
  content.class_labels = named ? model.class_labels : std::vector<double>();
  return absl::OkStatus();
}

absl::Status CheckScalingFits(const Scaling& scaling, int64_t features, bool classes) {
  if (scaling.kind == Normalize::kNone) return absl::OkStatus();
  if (static_cast<int64_t>(scaling.features.offset.size()) != features) {
    return InvalidArgument("the model was trained on samples of ", scaling.features.offset.size(),
                           " features; these have ", features);
  }
  if (classes != scaling.targets.offset.empty()) {
    return absl::InvalidArgumentError(classes ? "the model was trained on targets of a regression; these are classes"
                                              : "the model was trained on classes; these are targets of a regression");
  }
  return absl::OkStatus();
}

}  // namespace ps
