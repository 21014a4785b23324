#include "common/data_summary.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "common/status.h"

namespace ps {
namespace {

v1::ColumnStatistics ToProto(const ColumnStatistics& stats) {
  v1::ColumnStatistics message;
  message.mutable_mean()->Assign(stats.mean.begin(), stats.mean.end());
  message.mutable_squares()->Assign(stats.squares.begin(), stats.squares.end());
  message.mutable_low()->Assign(stats.low.begin(), stats.low.end());
  message.mutable_high()->Assign(stats.high.begin(), stats.high.end());
  return message;
}

ColumnStatistics FromProto(const v1::ColumnStatistics& message) {
  return {.mean = {message.mean().begin(), message.mean().end()},
          .squares = {message.squares().begin(), message.squares().end()},
          .low = {message.low().begin(), message.low().end()},
          .high = {message.high().begin(), message.high().end()}};
}

template <typename T>
bool AllFinite(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [](T value) { return std::isfinite(value); });
}

// They are of `columns`, or there are none.
bool Fits(const ColumnStatistics& stats, uint64_t columns) {
  if (stats == ColumnStatistics()) return true;
  const bool sizes = stats.low.size() == columns && stats.high.size() == columns &&
                     (stats.mean.empty() || stats.mean.size() == columns) && stats.squares.size() == stats.mean.size();
  if (!sizes || !AllFinite(stats.mean) || !AllFinite(stats.squares) || !AllFinite(stats.low) ||
      !AllFinite(stats.high)) {
    return false;
  }
  if (std::any_of(stats.squares.begin(), stats.squares.end(), [](double sum) { return sum < 0; })) return false;
  return std::equal(stats.low.begin(), stats.low.end(), stats.high.begin(), std::less_equal<>());
}

bool SameKind(const ColumnStatistics& a, const ColumnStatistics& b) {
  return a.low.empty() == b.low.empty() && a.mean.empty() == b.mean.empty();
}

// All values of the columns that it lacks are 0.
ColumnStatistics Widened(ColumnStatistics stats, size_t columns) {
  if (stats.low.empty()) return stats;
  stats.low.resize(columns);
  stats.high.resize(columns);
  if (stats.mean.empty()) return stats;
  stats.mean.resize(columns);
  stats.squares.resize(columns);
  return stats;
}

// One for each class or none, in order, none twice.
bool AreLabels(const std::vector<int64_t>& labels, uint32_t classes) {
  return labels.empty() || (labels.size() == classes &&
                            std::adjacent_find(labels.begin(), labels.end(), std::greater_equal<>()) == labels.end());
}

// Adds what is said of `added` samples to what is said of `samples`.
void Add(const ColumnStatistics& more, double added, double samples, ColumnStatistics& stats) {
  for (size_t k = 0; k < stats.low.size(); ++k) {
    stats.low[k] = std::min(stats.low[k], more.low[k]);
    stats.high[k] = std::max(stats.high[k], more.high[k]);
  }
  const double all = samples + added;
  for (size_t k = 0; k < stats.mean.size(); ++k) {
    const double apart = more.mean[k] - stats.mean[k];
    stats.mean[k] += apart * (added / all);
    stats.squares[k] += more.squares[k] + apart * apart * (samples * (added / all));
  }
}

}  // namespace

v1::DataSummary ToProto(const DataSummary& summary) {
  v1::DataSummary message;
  message.set_samples(summary.samples);
  message.set_largest(summary.largest);
  message.set_features(summary.features);
  message.set_classes(summary.classes);
  if (!summary.feature_stats.low.empty()) *message.mutable_feature_stats() = ToProto(summary.feature_stats);
  if (!summary.target_stats.low.empty()) *message.mutable_target_stats() = ToProto(summary.target_stats);
  message.mutable_labels()->Assign(summary.labels.begin(), summary.labels.end());
  message.set_sparse(summary.sparse);
  if (summary.first_index.has_value()) message.set_first_index(*summary.first_index);
  return message;
}

absl::StatusOr<DataSummary> FromProto(const v1::DataSummary& message) {
  if (message.samples() == 0 || message.features() == 0) {
    return InvalidArgument("own_data: ", message.samples(), " samples of ", message.features(),
                           " features; expected at least one of each");
  }
  const int columns = message.feature_stats().low_size();
  if (columns > kToldColumnsMax) {
    return InvalidArgument("own_data: statistics of ", columns, " features; at most ", kToldColumnsMax,
                           " are supported");
  }
  DataSummary summary = {.samples = message.samples(),
                         .largest = message.largest(),
                         .features = message.features(),
                         .classes = message.classes(),
                         .feature_stats = FromProto(message.feature_stats()),
                         .target_stats = FromProto(message.target_stats()),
                         .labels = {message.labels().begin(), message.labels().end()},
                         .sparse = message.sparse()};
  if (message.has_first_index()) summary.first_index = message.first_index();
  if (summary.first_index.value_or(0) > 1) {
    return InvalidArgument("own_data: features are counted from ", *summary.first_index, "; expected 0 or 1");
  }
  if (!AreLabels(summary.labels, summary.classes)) {
    return InvalidArgument("own_data: ", summary.labels.size(), " labels of ", summary.classes,
                           " classes; expected as many, ascending");
  }
  const bool of_targets = summary.target_stats != ColumnStatistics();
  if (!Fits(summary.feature_stats, summary.features) || !Fits(summary.target_stats, 1) ||
      (of_targets && summary.classes > 0)) {
    return InvalidArgument("own_data: the statistics cannot be those of samples with ", summary.features,
                           " features and ", summary.classes, " classes");
  }
  return summary;
}

bool CountAlike(const DataSummary& a, const DataSummary& b) {
  return !a.first_index.has_value() || !b.first_index.has_value() || a.first_index == b.first_index;
}

bool SameKind(const DataSummary& a, const DataSummary& b) {
  return CountAlike(a, b) && a.sparse == b.sparse && (a.sparse || a.features == b.features) &&
         (a.classes == 0) == (b.classes == 0) && a.labels.empty() == b.labels.empty() &&
         SameKind(a.feature_stats, b.feature_stats) && SameKind(a.target_stats, b.target_stats);
}

bool Covers(const DataSummary& all, const DataSummary& one) {
  return one.features <= all.features &&
         std::includes(all.labels.begin(), all.labels.end(), one.labels.begin(), one.labels.end());
}

DataSummary Combine(const std::vector<DataSummary>& summaries) {
  DataSummary all = summaries.front();
  all.largest = all.samples;
  for (const DataSummary& one : summaries) all.features = std::max(all.features, one.features);
  const auto columns = static_cast<size_t>(all.features);
  all.feature_stats = Widened(std::move(all.feature_stats), columns);
  for (auto next = summaries.begin() + 1; next != summaries.end(); ++next) {
    const auto samples = static_cast<double>(all.samples);
    const auto added = static_cast<double>(next->samples);
    Add(Widened(next->feature_stats, columns), added, samples, all.feature_stats);
    Add(next->target_stats, added, samples, all.target_stats);
    all.samples += next->samples;
    all.largest = std::max(all.largest, next->samples);
    all.classes = std::max(all.classes, next->classes);
    if (!all.first_index.has_value()) all.first_index = next->first_index;
    std::vector<int64_t> labels;
    std::set_union(all.labels.begin(), all.labels.end(), next->labels.begin(), next->labels.end(),
                   std::back_inserter(labels));
    all.labels = std::move(labels);
  }
  if (!all.labels.empty()) all.classes = static_cast<uint32_t>(all.labels.size());
  return all;
}

}  // namespace ps
