// --data=own: each worker reads samples of its own. What all workers must do alike follows from what they have
// together.
#pragma once

#include "absl/status/statusor.h"
#include "ps/data_summary.h"
#include "worker/data/load.h"

namespace ps {

// The summary of the training samples. INVALID_ARGUMENT, naming --normalize, if it would need statistics of more than
// kToldColumnsMax features.
absl::StatusOr<DataSummary> Summarise(const UnscaledSplits& splits);

// This worker's samples, with as many classes as there are together, scaled by the statistics of all training samples.
// INVALID_ARGUMENT also if `of_all` is of other samples than these.
absl::StatusOr<DataSplits> ScaleOwn(UnscaledSplits splits, const DataSummary& of_all, const DatasetOptions& options);

}  // namespace ps
