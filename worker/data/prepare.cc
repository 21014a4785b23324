#include "worker/data/prepare.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

template <typename T>
std::vector<T> CropRows(const std::vector<T>& values, int64_t side, int64_t crop) {
  std::vector<T> cropped;
  const auto area = static_cast<size_t>(side * side);
  cropped.reserve(values.size() / area * static_cast<size_t>(crop * crop));
  const int64_t margin = (side - crop) / 2;
  for (size_t image = 0; image < values.size(); image += area) {
    for (int64_t row = margin; row < margin + crop; ++row) {
      const auto begin = values.begin() + static_cast<int64_t>(image) + row * side + margin;
      cropped.insert(cropped.end(), begin, begin + crop);
    }
  }
  return cropped;
}

// How many of each group go to validation: in proportion, rounded down, and one more
// for those that rounding hurt most until the sum is right.
std::vector<int64_t> Quotas(const std::vector<std::vector<int32_t>>& groups, double fraction, int64_t total) {
  std::vector<int64_t> quotas;
  std::vector<double> remainders;
  for (const auto& group : groups) {
    const double exact = fraction * static_cast<double>(group.size());
    quotas.push_back(static_cast<int64_t>(std::floor(exact)));
    remainders.push_back(exact - std::floor(exact));
  }
  std::vector<size_t> order(groups.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return remainders[a] > remainders[b]; });
  int64_t missing = total - std::accumulate(quotas.begin(), quotas.end(), int64_t{0});
  for (size_t i = 0; i < order.size() && missing > 0; ++i) {
    if (quotas[order[i]] == static_cast<int64_t>(groups[order[i]].size())) continue;
    ++quotas[order[i]];
    --missing;
  }
  return quotas;
}

// The positions in `indices` of each class; one group for regression.
std::vector<std::vector<int32_t>> GroupByClass(const DatasetContent& content, const std::vector<int32_t>& indices) {
  std::vector<std::vector<int32_t>> groups(static_cast<size_t>(std::max(content.classes, 1)));
  for (size_t i = 0; i < indices.size(); ++i) {
    const int32_t group = content.classes > 0 ? content.labels[static_cast<size_t>(indices[i])] : 0;
    groups[static_cast<size_t>(group)].push_back(static_cast<int32_t>(i));
  }
  return groups;
}

std::string Identity(const RawSplits& raw) {
  const auto describe = [](const DatasetContent& content, const char* what) {
    return absl::StrFormat("%d %s with hash %016x", content.size(), what, Fingerprint(content));
  };
  return absl::StrCat(describe(raw.train, "samples"), ", ",
                      raw.test.has_value() ? describe(*raw.test, "test samples") : "no test samples");
}

absl::Status Scale(const Scaling& scaling, int64_t bytes_max, DatasetContent& content) {
  PS_RETURN_IF_ERROR(Check(content));
  return ApplyScaling(scaling, bytes_max, content);
}

}  // namespace

absl::StatusOr<DatasetContent> Crop(DatasetContent content, int crop) {
  if (crop < 1) return InvalidArgument("crop is ", crop, "; expected at least 1");
  if (content.rows == 0) {
    const auto side = static_cast<int64_t>(std::lround(std::sqrt(static_cast<double>(content.features))));
    if (side * side != content.features) {
      return InvalidArgument("crop=", crop, " needs square images; the samples have ", content.features, " features");
    }
    content.rows = content.columns = side;
  }
  if (content.rows != content.columns) {
    return InvalidArgument("crop=", crop, " needs square images; these are ", content.rows, " x ", content.columns);
  }
  if (crop > content.rows) {
    return InvalidArgument("crop=", crop, " is larger than the images, which are ", content.rows, " x ",
                           content.columns);
  }
  if (crop == content.rows) return content;
  content.bytes = CropRows(content.bytes, content.rows, crop);
  content.floats = CropRows(content.floats, content.rows, crop);
  content.doubles = CropRows(content.doubles, content.rows, crop);
  content.rows = content.columns = crop;
  content.features = int64_t{crop} * crop;
  return content;
}

absl::StatusOr<std::vector<int32_t>> FirstOfEachClass(const DatasetContent& content, int count) {
  if (count < 1) return InvalidArgument("samples_per_class is ", count, "; expected at least 1");
  if (content.classes == 0) {
    return InvalidArgument("samples_per_class=", count, " needs classes; the labels are regression targets");
  }
  std::vector<int32_t> all(content.labels.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<int32_t> chosen;
  const auto groups = GroupByClass(content, all);
  for (size_t c = 0; c < groups.size(); ++c) {
    if (groups[c].size() < static_cast<size_t>(count)) {
      return InvalidArgument("samples_per_class=", count, " is more than class ", c, " has: ", groups[c].size(),
                             " samples");
    }
    chosen.insert(chosen.end(), groups[c].begin(), groups[c].begin() + count);
  }
  return chosen;
}

absl::StatusOr<ValidationSplit> SplitValidation(const DatasetContent& content, std::vector<int32_t> indices,
                                                double fraction, uint64_t seed) {
  if (!(fraction >= 0 && fraction < 1)) {
    return InvalidArgument("validation_split is ", fraction, "; expected 0 to below 1");
  }
  if (fraction == 0) return ValidationSplit{.train = std::move(indices), .validation = {}};
  const auto size = static_cast<int64_t>(indices.size());
  const int64_t total = std::llround(fraction * static_cast<double>(size));
  if (total == 0 || total == size) {
    return InvalidArgument("validation_split=", fraction, " of ", size, " samples takes ", total,
                           "; expected at least 1 and some left to train on");
  }
  auto groups = GroupByClass(content, indices);
  const std::vector<int64_t> quotas = Quotas(groups, fraction, total);
  std::mt19937_64 random = MakeRandom(seed, kValidationStream);
  std::vector<bool> taken(indices.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    PermuteInPlace(random, std::span(groups[g]));
    for (int64_t i = 0; i < quotas[g]; ++i) taken[static_cast<size_t>(groups[g][static_cast<size_t>(i)])] = true;
  }
  ValidationSplit split;
  for (size_t i = 0; i < indices.size(); ++i) (taken[i] ? split.validation : split.train).push_back(indices[i]);
  return split;
}

absl::StatusOr<UnscaledSplits> CutSplits(RawSplits raw, Normalize normalize, const DatasetOptions& options) {
  UnscaledSplits splits = {
      .unlabelled_test = raw.unlabelled_test, .normalize = normalize, .notes = std::move(raw.notes)};
  if (!options.own) splits.identity = Identity(raw);
  if (options.crop > 0) {
    PS_ASSIGN_OR_RETURN(raw.train, Crop(std::move(raw.train), options.crop));
    if (raw.test.has_value()) {
      PS_ASSIGN_OR_RETURN(raw.test, Crop(*std::move(raw.test), options.crop));
    }
  }
  std::vector<int32_t> chosen(static_cast<size_t>(raw.train.size()));
  std::iota(chosen.begin(), chosen.end(), 0);
  if (options.samples_per_class > 0) {
    PS_ASSIGN_OR_RETURN(chosen, FirstOfEachClass(raw.train, options.samples_per_class));
  }
  PS_ASSIGN_OR_RETURN(ValidationSplit split,
                      SplitValidation(raw.train, std::move(chosen), options.validation_split, options.seed));
  splits.validation = Select(raw.train, split.validation);
  const bool all = options.samples_per_class == 0 && split.validation.empty();
  splits.train = all ? std::move(raw.train) : Select(raw.train, split.train);
  splits.test = std::move(raw.test);
  if (normalize == Normalize::kNone) {
    DataNotes merged = FindMerged(splits.train);
    std::move(merged.begin(), merged.end(), std::back_inserter(splits.notes));
  }
  // Before one bad value spoils the statistics of all.
  if (normalize != Normalize::kNone) PS_RETURN_IF_ERROR(Check(splits.train));
  return splits;
}

absl::StatusOr<DataSplits> ScaleSplits(UnscaledSplits splits, Scaling scaling, int64_t bytes_max) {
  if (scaling.kind != Normalize::kNone) {
    PS_RETURN_IF_ERROR(ApplyScaling(scaling, bytes_max, splits.train));
    PS_RETURN_IF_ERROR(Annotate(Scale(scaling, bytes_max, splits.validation), "validation split"));
    if (splits.test.has_value()) PS_RETURN_IF_ERROR(Annotate(Scale(scaling, bytes_max, *splits.test), "test split"));
  }
  DataSplits made = {
      .scaling = std::move(scaling), .identity = std::move(splits.identity), .notes = std::move(splits.notes)};
  PS_ASSIGN_OR_RETURN(made.train, Dataset::Create(std::move(splits.train)));
  PS_ASSIGN_OR_RETURN(made.validation, Dataset::Create(std::move(splits.validation)));
  made.unlabelled_test = splits.unlabelled_test;
  made.test_is_train = !splits.test.has_value();
  if (made.test_is_train) {
    made.test = made.train;
  } else {
    PS_ASSIGN_OR_RETURN(made.test, Dataset::Create(*std::move(splits.test)));
  }
  return made;
}

}  // namespace ps
