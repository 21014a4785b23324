// Features, and the targets of a regression, brought to a common scale by statistics of the training samples.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/data_summary.h"
#include "worker/data/dataset.h"

namespace ps {

enum class Normalize {
  kAuto,      // kStandard for tables of numbers (csv, libsvm); kNone for images and synthetic samples.
  kNone,      // Values stay as they were read.
  kMinMax,    // The training samples' smallest value becomes 0, their largest 1.
  kStandard,  // Mean 0 and standard deviation 1 (of the population) over the training samples.
};

// "auto", "none", "minmax" or "standard". INVALID_ARGUMENT, naming --normalize, for anything else.
absl::StatusOr<Normalize> ParseNormalize(const std::string& text);
std::string ToString(Normalize kind);

// So many features can be normalised: twice as many numbers as text must fit into the header of a saved model.
inline constexpr int64_t kNormalizedFeaturesMax = int64_t{1} << 20;

// For each column k a value x becomes float((x − offset[k]) / scale[k]), computed in double.
struct ColumnScaling {
  std::vector<double> offset;
  std::vector<double> scale;  // Above 0: 1 where the training samples have but one value.
};

struct Scaling {
  Normalize kind = Normalize::kNone;  // What was done: never kAuto.
  ColumnScaling features;             // One column a feature, a byte counting as byte / 255; none for kNone.
  ColumnScaling targets;              // One column for a regression; none for kNone and for classes.

  // What a squared error of scaled targets is to be multiplied by to be in the units of the targets as read.
  double squared_error_unit() const { return targets.scale.empty() ? 1 : targets.scale[0] * targets.scale[0]; }

  // For the metadata of a saved model: `normalize`, and if that is not "none", `feature_offset` and `feature_scale` as
  // JSON arrays (one number per feature; a byte counts as byte / 255) and, for a regression, `target_offset` and
  // `target_scale`. Each number is the shortest decimal that reads back as the same double. The network's input is
  // (x − feature_offset) / feature_scale; a regression's prediction is target_offset + target_scale · output.
  std::map<std::string, std::string> Metadata() const;
};

// What a scaling follows from, a byte counting as byte / 255: of the features, and of a regression's targets. Of
// kMinMax ranges only; of kNone nothing.
struct Statistics {
  ColumnStatistics features;
  ColumnStatistics targets;
};

// Those of `train`, in double and in the order of its samples: the same bits on every worker. All values must be
// finite. INVALID_ARGUMENT if there are more than `features_max` features.
absl::StatusOr<Statistics> FindStatistics(const DatasetContent& train, Normalize kind,
                                          int64_t features_max = kNormalizedFeaturesMax);
// What they come to, of so many samples.
Scaling ScalingOf(const Statistics& statistics, uint64_t samples, Normalize kind);
// That of `train`. INVALID_ARGUMENT as above.
absl::StatusOr<Scaling> FindScaling(const DatasetContent& train, Normalize kind);

// Warns of each feature, and of the targets, whose different values become equal where they are rounded to floats as
// they are (kNone): more than one in a hundred of those of the first samples.
DataNotes FindMerged(const DatasetContent& train);

// Scales the features and targets; bytes become floats. INVALID_ARGUMENT names the first sample whose scaled value does
// not fit into a float; RESOURCE_EXHAUSTED if floats in the place of bytes would take more than `bytes_max`.
absl::Status ApplyScaling(const Scaling& scaling, int64_t bytes_max, DatasetContent& content);

}  // namespace ps
