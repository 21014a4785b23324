#include "worker/data/splits.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "worker/data/prepare.h"

namespace ps {
namespace {

std::string Identity(const RawSplits& raw) {
  const auto describe = [](const DatasetContent& content, const char* what) {
    return absl::StrFormat("%d %s with hash %016x", content.size(), what, Fingerprint(content));
  };
  return absl::StrCat(describe(raw.train, "samples"), ", ",
                      raw.test.has_value() ? describe(*raw.test, "test samples") : "no test samples");
}

absl::Status CropSplits(RawSplits& raw, int crop) {
  absl::StatusOr<DatasetContent> train = Crop(std::move(raw.train), crop);
  if (!train.ok()) return train.status();
  raw.train = *std::move(train);
  if (!raw.test.has_value()) return absl::OkStatus();
  absl::StatusOr<DatasetContent> test = Crop(*std::move(raw.test), crop);
  if (!test.ok()) return test.status();
  raw.test = *std::move(test);
  return absl::OkStatus();
}

// The indices of the training samples, before validation is split off.
absl::StatusOr<std::vector<int32_t>> ChooseSamples(const DatasetContent& train, int samples_per_class) {
  if (samples_per_class > 0) return FirstOfEachClass(train, samples_per_class);
  std::vector<int32_t> all(static_cast<size_t>(train.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

absl::Status MoveTo(Dataset& dataset, DatasetContent content) {
  absl::StatusOr<Dataset> made = Dataset::Create(std::move(content));
  if (!made.ok()) return made.status();
  dataset = *std::move(made);
  return absl::OkStatus();
}

absl::Status Scale(const Scaling& scaling, int64_t bytes_max, DatasetContent& content) {
  PS_RETURN_IF_ERROR(Check(content));
  return ApplyScaling(scaling, bytes_max, content);
}

}  // namespace

absl::StatusOr<UnscaledSplits> CutSplits(RawSplits raw, Normalize normalize, const DatasetOptions& options) {
  UnscaledSplits splits = {
      .unlabelled_test = raw.unlabelled_test, .normalize = normalize, .notes = std::move(raw.notes)};
  if (!options.own) splits.identity = Identity(raw);
  if (options.crop > 0) {
    PS_RETURN_IF_ERROR(CropSplits(raw, options.crop));
  }
  absl::StatusOr<std::vector<int32_t>> chosen = ChooseSamples(raw.train, options.samples_per_class);
  if (!chosen.ok()) return chosen.status();
  absl::StatusOr<ValidationSplit> split =
      SplitValidation(raw.train, *std::move(chosen), options.validation_split, options.seed);
  if (!split.ok()) return split.status();
  splits.validation = Select(raw.train, split->validation);
  const bool all = options.samples_per_class == 0 && split->validation.empty();
  splits.train = all ? std::move(raw.train) : Select(raw.train, split->train);
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
  PS_RETURN_IF_ERROR(MoveTo(made.train, std::move(splits.train)));
  PS_RETURN_IF_ERROR(MoveTo(made.validation, std::move(splits.validation)));
  made.unlabelled_test = splits.unlabelled_test;
  made.test_is_train = !splits.test.has_value();
  if (made.test_is_train) {
    made.test = made.train;
  } else {
    PS_RETURN_IF_ERROR(MoveTo(made.test, *std::move(splits.test)));
  }
  return made;
}

}  // namespace ps
