#include "worker/data/own_data.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "worker/data/splits.h"

namespace ps {

absl::StatusOr<DataSummary> Summarise(const UnscaledSplits& splits) {
  const DatasetContent& train = splits.train;
  absl::StatusOr<Statistics> statistics = FindStatistics(train, splits.normalize, kToldColumnsMax);
  if (!statistics.ok()) return Annotate(statistics.status(), "--data=own");
  return DataSummary{.samples = static_cast<uint64_t>(train.size()),
                     .features = static_cast<uint64_t>(train.features),
                     .classes = static_cast<uint32_t>(train.classes),
                     .feature_stats = std::move(statistics->features),
                     .target_stats = std::move(statistics->targets)};
}

absl::StatusOr<DataSplits> ScaleOwn(UnscaledSplits splits, const DataSummary& of_all, const DatasetOptions& options) {
  const auto features = static_cast<uint64_t>(splits.train.features);
  const auto classes = static_cast<uint32_t>(splits.train.classes);
  const size_t columns = splits.normalize == Normalize::kNone ? 0 : static_cast<size_t>(splits.train.features);
  if (of_all.features != features || (of_all.classes == 0) != (classes == 0) || of_all.classes < classes ||
      of_all.classes > static_cast<uint32_t>(kClassesMax) || of_all.feature_stats.low.size() != columns ||
      of_all.target_stats.low.empty() != (columns == 0 || classes > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("--data=own: all workers' data are told to have ", of_all.features,
                                                   " features and ", of_all.classes, " classes; this worker's have ",
                                                   features, " and ", classes));
  }
  const auto all_classes = static_cast<int32_t>(of_all.classes);
  splits.train.classes = splits.validation.classes = all_classes;
  if (splits.test.has_value()) splits.test->classes = all_classes;
  Scaling scaling =
      ScalingOf({.features = of_all.feature_stats, .targets = of_all.target_stats}, of_all.samples, splits.normalize);
  absl::StatusOr<DataSplits> made = ScaleSplits(std::move(splits), std::move(scaling), options.bytes_max);
  if (!made.ok()) return Annotate(made.status(), absl::StrCat("dataset \"", options.dataset, "\""));
  return made;
}

}  // namespace ps
