// From samples as they were read to splits: first what each file decides, then what statistics do.
#pragma once

#include "absl/status/statusor.h"
#include "worker/data/formats.h"
#include "worker/data/load.h"

namespace ps {

// Crops, takes samples_per_class and splits off validation. `normalize` is never kAuto. Errors are as of LoadDataset.
absl::StatusOr<UnscaledSplits> CutSplits(RawSplits raw, Normalize normalize, const DatasetOptions& options);

// Scales all splits, in floats that take `bytes_max` at the most. Nothing is done to them if the scaling's kind is
// kNone. Errors are as of ApplyScaling and Check.
absl::StatusOr<DataSplits> ScaleSplits(UnscaledSplits splits, Scaling scaling, int64_t bytes_max);

}  // namespace ps
