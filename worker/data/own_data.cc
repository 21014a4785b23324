#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/data/prepare.h"

namespace ps {
namespace {

// Zeros for features that it does not have, and classes by the labels of all.
absl::Status FitSparse(const DataSummary& of_all, const TrainedWith& classes, DatasetContent& content) {
  const int64_t size = content.size();
  const auto width = static_cast<size_t>(of_all.features);
  const auto own = static_cast<size_t>(content.features);
  if (own < width) {
    std::vector<double> doubles(static_cast<size_t>(size) * width);
    for (size_t i = 0; i < static_cast<size_t>(size); ++i) {
      std::copy_n(content.doubles.begin() + static_cast<int64_t>(i * own), own,
                  doubles.begin() + static_cast<int64_t>(i * width));
    }
    content.doubles = std::move(doubles);
    content.features = static_cast<int64_t>(width);
  }
  if (size > 0) return TakeClassesOf(classes, content);
  content.class_labels = {};  // There may be no validation split.
  return absl::OkStatus();
}

absl::Status FitSparse(const DataSummary& of_all, int64_t bytes_max, UnscaledSplits& splits) {
  const int64_t samples =
      splits.train.size() + splits.validation.size() + (splits.test.has_value() ? splits.test->size() : 0);
  if (static_cast<int64_t>(of_all.features) > kFeaturesMax ||
      static_cast<int64_t>(of_all.features * sizeof(double)) > bytes_max / std::max<int64_t>(samples, 1)) {
    return ResourceExhausted(samples, " dense samples of ", of_all.features,
                             " features, as other workers have, take more than the limit of ", bytes_max, " bytes");
  }
  TrainedWith classes;
  classes.class_labels.assign(of_all.labels.begin(), of_all.labels.end());
  PS_RETURN_IF_ERROR(FitSparse(of_all, classes, splits.train));
  PS_RETURN_IF_ERROR(FitSparse(of_all, classes, splits.validation));
  return splits.test.has_value() ? FitSparse(of_all, classes, *splits.test) : absl::OkStatus();
}

}  // namespace

absl::StatusOr<DataSummary> Summarise(const UnscaledSplits& splits) {
  const DatasetContent& train = splits.train;
  PS_ASSIGN_OR_RETURN(Statistics statistics,
                      Annotate(FindStatistics(train, splits.normalize, kToldColumnsMax), "--data=own"));
  std::vector<double> labels;
  if (splits.sparse) labels = ClassLabels(train.classes, train.class_labels);
  return DataSummary{.samples = static_cast<uint64_t>(train.size()),
                     .features = static_cast<uint64_t>(train.features),
                     .classes = static_cast<uint32_t>(train.classes),
                     .feature_stats = std::move(statistics.features),
                     .target_stats = std::move(statistics.targets),
                     .labels = {labels.begin(), labels.end()},
                     .sparse = splits.sparse,
                     .first_index = train.first_index};
}

absl::StatusOr<DataSplits> ScaleOwn(UnscaledSplits splits, const DataSummary& of_all, const DatasetOptions& options) {
  if (splits.sparse && of_all.sparse && of_all.features >= static_cast<uint64_t>(splits.train.features) &&
      (of_all.classes == 0) == (splits.train.classes == 0) && of_all.labels.size() == of_all.classes) {
    PS_RETURN_IF_ERROR(Annotate(FitSparse(of_all, options.bytes_max, splits),
                                absl::StrCat("--data=own: dataset \"", options.dataset, "\"")));
  }
  const auto features = static_cast<uint64_t>(splits.train.features);
  const auto classes = static_cast<uint32_t>(splits.train.classes);
  const size_t columns = splits.normalize == Normalize::kNone ? 0 : static_cast<size_t>(splits.train.features);
  if (of_all.features != features || (of_all.classes == 0) != (classes == 0) || of_all.classes < classes ||
      of_all.classes > static_cast<uint32_t>(kClassesMax) || of_all.feature_stats.low.size() != columns ||
      of_all.target_stats.low.empty() != (columns == 0 || classes > 0)) {
    return InvalidArgument("--data=own: all workers' data are told to have ", of_all.features, " features and ",
                           of_all.classes, " classes; this worker's have ", features, " and ", classes);
  }
  const auto all_classes = static_cast<int32_t>(of_all.classes);
  splits.train.classes = splits.validation.classes = all_classes;
  if (splits.test.has_value()) splits.test->classes = all_classes;
  Scaling scaling =
      ScalingOf({.features = of_all.feature_stats, .targets = of_all.target_stats}, of_all.samples, splits.normalize);
  return Annotate(ScaleSplits(std::move(splits), std::move(scaling), options.bytes_max),
                  absl::StrCat("dataset \"", options.dataset, "\""));
}

}  // namespace ps
