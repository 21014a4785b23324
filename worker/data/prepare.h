// What is done to samples between their file and training. Each step is a function of its arguments alone, so every
// worker that loads the same files prepares the same samples.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/data/formats.h"
#include "worker/data/load.h"

namespace ps {

// The centre `crop` x `crop` pixels of each image, row-major. Samples that are not known to be images are taken as
// square ones if their number of features is a square. INVALID_ARGUMENT if the images are not square or are smaller.
absl::StatusOr<DatasetContent> Crop(DatasetContent content, int crop);

// The first `count` samples of each class in their order, class 0 before class 1 and so on. INVALID_ARGUMENT if a class
// has fewer, or there are no classes.
absl::StatusOr<std::vector<int32_t>> FirstOfEachClass(const DatasetContent& content, int count);

// Takes round(fraction * n) of the n samples `indices` out for validation, at random from (seed) and from each class in
// proportion, as near as whole samples allow (largest remainder). Both parts keep the order of `indices`.
// INVALID_ARGUMENT if either part is empty although `fraction` is above 0, or `fraction` is not in [0, 1).
struct ValidationSplit {
  std::vector<int32_t> train;
  std::vector<int32_t> validation;
};
absl::StatusOr<ValidationSplit> SplitValidation(const DatasetContent& content, std::vector<int32_t> indices,
                                                double fraction, uint64_t seed);

// From samples as they were read to splits: first what each file decides, then what statistics do.

// Crops, takes samples_per_class and splits off validation. `normalize` is never kAuto. Errors are as of LoadDataset.
absl::StatusOr<UnscaledSplits> CutSplits(RawSplits raw, Normalize normalize, const DatasetOptions& options);

// Scales all splits, in floats that take `bytes_max` at the most. Nothing is done to them if the scaling's kind is
// kNone. Errors are as of ApplyScaling and Check.
absl::StatusOr<DataSplits> ScaleSplits(UnscaledSplits splits, Scaling scaling, int64_t bytes_max);

}  // namespace ps
