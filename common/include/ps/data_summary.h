// What workers tell of training samples that are their own (--data=own), so that all prepare them alike.
#pragma once

#include <cstdint>
#include <vector>

namespace ps {

// Of the values in each column. Empty: there are none.
struct ColumnStatistics {
  std::vector<double> mean;     // Empty where only ranges are needed, as is the next.
  std::vector<double> squares;  // The sum of the squared distances from the mean.
  std::vector<double> low;      // The smallest value.
  std::vector<double> high;     // The largest.

  bool operator==(const ColumnStatistics&) const = default;
};

// So many columns are the most whose statistics can be told.
inline constexpr int64_t kToldColumnsMax = 32768;

// Of one worker's training split, or of those of all workers together.
struct DataSummary {
  uint64_t samples = 0;
  uint64_t largest = 0;            // Of all together: the samples of the worker that has the most.
  uint64_t features = 0;           // Of all together the largest number.
  uint32_t classes = 0;            // 0: a regression. Of all together the largest number.
  ColumnStatistics feature_stats;  // One column a feature; empty if samples are not normalised.
  ColumnStatistics target_stats;   // One column, if a regression's samples are normalised.
  // Ascending: what each class is called, where they are counted through; of all together those that any worker has.
  // Empty: class k is called k, or it is a regression.
  std::vector<int64_t> labels;
  bool sparse = false;  // Features that a worker does not have are 0, so workers may have different numbers of them.

  bool operator==(const DataSummary&) const = default;
};

}  // namespace ps
