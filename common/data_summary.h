// Summaries of data (ps/data_summary.h): on the wire, and several as one.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "ps/data_summary.h"
#include "ps/v1/ps.pb.h"

namespace ps {

v1::DataSummary ToProto(const DataSummary& summary);

// INVALID_ARGUMENT, naming what is wrong: no sample or no feature, statistics that are not of these features or of
// nothing that can be, or of more than kToldColumnsMax.
absl::StatusOr<DataSummary> FromProto(const v1::DataSummary& message);

// Whether the first feature has the same number in both, as far as they tell.
bool CountAlike(const DataSummary& a, const DataSummary& b);

// Whether both are of samples with the same features (or of sparse ones, counted alike), either of classes with or
// without labels or of a regression, with the same kind of statistics, so that they can be combined.
bool SameKind(const DataSummary& a, const DataSummary& b);

// Whether `all` has every feature and label of `one`, which is of the same kind.
bool Covers(const DataSummary& all, const DataSummary& one);

// The summary of all samples together. The order counts: statistics are combined one after another, by the formulas of
// Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for computing sample variances, 1979), which do
// not subtract large numbers from each other. At least one; all are of the same kind.
DataSummary Combine(const std::vector<DataSummary>& summaries);

}  // namespace ps
