// What workers tell of training samples that are their own (--data=own), so that all prepare them alike.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ps {

// Describes the values in each column; it is empty where there are none.
struct ColumnStatistics {
  std::vector<double> mean;     // It is empty where only ranges are needed, as is the next.
  std::vector<double> squares;  // The sum of the squared distances from the mean.
  std::vector<double> low;      // The smallest value.
  std::vector<double> high;     // The largest.

  bool operator==(const ColumnStatistics&) const = default;
};

// So many columns are the most whose statistics can be told.
inline constexpr int64_t kToldColumnsMax = 32768;

// Describes one worker's training split, or those of all workers together.
struct DataSummary {
  uint64_t samples = 0;
  uint64_t largest = 0;            // Those of the worker that has the most, in a summary of all workers. Else 0.
  uint64_t features = 0;           // The largest number that a worker has, in a summary of all workers.
  uint32_t classes = 0;            // The same of classes; 0 stands for a regression.
  ColumnStatistics feature_stats;  // One column a feature; empty if samples are not normalised.
  ColumnStatistics target_stats;   // One column, if a regression's samples are normalised.
  // These say what each class is called, ascending; a summary of all has those of any worker. There are none where
  // class k is called k, and none of a regression.
  std::vector<int64_t> labels;
  bool sparse = false;  // Features that a worker does not have are 0, so workers may have different numbers of them.
  // Says which number the first sparse feature has in the workers' files, 0 or 1; unset: that is not told.
  std::optional<uint32_t> first_index = {};

  bool operator==(const DataSummary&) const = default;
};

}  // namespace ps
