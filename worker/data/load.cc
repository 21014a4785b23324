#include "worker/data/load.h"

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/problems.h"
#include "common/status.h"
#include "worker/data/formats.h"
#include "worker/data/prepare.h"
#include "worker/data/spec.h"

namespace ps {
namespace {

constexpr int32_t kMnistClasses = 10;

bool IsFile(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

std::string Join(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).string();
}

// `stem` as MNIST's files have been published: "train-images" may be train-images-idx3-ubyte or
// train-images.idx3-ubyte, either with .gz. Empty if `folder` holds none.
std::string FindMnistFile(const std::string& folder, const std::string& stem, const std::string& suffix) {
  for (const char* separator : {"-", "."}) {
    for (const char* extension : {"", ".gz"}) {
      std::string path = Join(folder, absl::StrCat(stem, separator, suffix, extension));
      if (IsFile(path)) return path;
    }
  }
  return {};
}

absl::StatusOr<RawSplits> LoadMnist(const DatasetOptions& options, const std::string& name) {
  const std::string& root = options.data_dir;
  const std::string torchvision = name == "mnist" ? "MNIST/raw" : "FashionMNIST/raw";
  // A folder of the dataset's own name comes first: all such datasets use the same file names.
  const std::vector<std::string> folders =
      root.empty() ? std::vector<std::string>{Join("/usr/share/datasets", name)}
                   : std::vector<std::string>{Join(root, name), Join(root, torchvision), root};
  for (const std::string& folder : folders) {
    std::vector<std::string> missing;
    const auto find = [&](const std::string& stem, const std::string& suffix) {
      std::string path = FindMnistFile(folder, stem, suffix);
      if (path.empty()) missing.push_back(absl::StrCat(stem, "-", suffix, "[.gz]"));
      return path;
    };
    const IdxPaths paths = {.images = find("train-images", "idx3-ubyte"),
                            .labels = find("train-labels", "idx1-ubyte"),
                            .test_images = find("t10k-images", "idx3-ubyte"),
                            .test_labels = find("t10k-labels", "idx1-ubyte")};
    if (missing.empty()) return LoadIdx(paths, kMnistClasses, options.bytes_max);
    if (missing.size() < 4) {
      return NotFound("dataset \"", name, "\": no ", absl::StrJoin(missing, ", "), " in ", folder);
    }
  }
  return NotFound("dataset \"", name, "\": no train-images-idx3-ubyte[.gz] in ", absl::StrJoin(folders, ", "),
                  root.empty() ? "; data_dir says where else to look" : "");
}

// The spec's paths, each as it is or in data_dir.
absl::StatusOr<std::vector<std::string>> FindPaths(const DatasetSpec& spec, const std::string& data_dir) {
  std::vector<std::string> paths;
  for (const std::string& path : spec.paths) {
    std::error_code error;
    const bool relative = !data_dir.empty() && std::filesystem::path(path).is_relative();
    const std::string inside = relative ? Join(data_dir, path) : path;
    if (std::filesystem::exists(path, error)) {
      paths.push_back(path);
    } else if (relative && std::filesystem::exists(inside, error)) {
      paths.push_back(inside);
    } else {
      return NotFound("dataset \"", spec.text, "\": no file ", path, relative ? absl::StrCat(" or ", inside) : "");
    }
  }
  paths.resize(4);
  return paths;
}

// How the tables of csv and libsvm are to be read.
struct TableOptions {
  CsvOptions csv;
  LibsvmOptions libsvm;
};

absl::StatusOr<TableOptions> ParseTableOptions(const DatasetSpec& spec) {
  PS_ASSIGN_OR_RETURN(const std::string header, spec.Word("header", {"auto", "yes", "no"}, "auto"));
  PS_ASSIGN_OR_RETURN(const std::string zero_based, spec.Word("zero_based", {"auto", "yes", "no"}, "auto"));
  absl::StatusOr<int64_t> features = 0;
  if (spec.format == "libsvm") features = spec.Integer("features", 1, kFeaturesMax, 0);
  if (!features.ok()) return features.status();
  PS_ASSIGN_OR_RETURN(const std::string task, spec.Word("task", {"auto", "classification", "regression"}, "auto"));
  PS_ASSIGN_OR_RETURN(const std::string label, spec.Word("label", {"first", "last"}, "last"));
  TableOptions options;
  options.csv.label_first = label == "first";
  options.libsvm.features = *features;
  if (header != "auto") options.csv.header = header == "yes" ? Header::kYes : Header::kNo;
  if (zero_based != "auto") options.libsvm.base = zero_based == "yes" ? IndexBase::kZero : IndexBase::kOne;
  if (task != "auto") options.csv.task = task == "regression" ? Task::kRegression : Task::kClassification;
  options.libsvm.task = options.csv.task;
  return options;
}

// Indices are counted as they were in what the model was trained on.
absl::Status TakeBaseOf(const TrainedWith& model, LibsvmOptions& options) {
  if (!model.first_index.has_value()) return absl::OkStatus();
  const IndexBase base = *model.first_index == 0 ? IndexBase::kZero : IndexBase::kOne;
  if (options.base != IndexBase::kAuto && options.base != base) {
    return InvalidArgument("the model was trained on indices counted from ", *model.first_index,
                           ", and its file says so; leave zero_based out");
  }
  options.base = base;
  options.base_of_model = true;
  return absl::OkStatus();
}

absl::StatusOr<RawSplits> LoadRaw(const DatasetSpec& spec, const DatasetOptions& options, const TrainedWith& model) {
  if (spec.format == "synthetic") {
    PS_ASSIGN_OR_RETURN(const SyntheticOptions synthetic, ParseSynthetic(spec, options.bytes_max));
    return MakeSynthetic(synthetic, options.seed);
  }
  if (spec.format == "function") return MakeFunction(spec, options.seed, options.bytes_max);
  if (spec.format == "mnist" || spec.format == "fashion-mnist") return LoadMnist(options, spec.format);
  PS_ASSIGN_OR_RETURN(TableOptions table, ParseTableOptions(spec));
  PS_ASSIGN_OR_RETURN(const std::vector<std::string> path, FindPaths(spec, options.data_dir));
  if (spec.format == "csv") {
    table.csv.unlabelled_test = options.unlabelled_test;
    table.csv.bytes_max = options.bytes_max;
    return LoadCsv(path[0], path[1], table.csv);
  }
  if (spec.format == "libsvm") {
    // The lead's test file may have labels that only other workers train on.
    table.libsvm.mapping = options.own ? LabelMapping::kRankOfBoth : LabelMapping::kRank;
    table.libsvm.any_test_label = options.unlabelled_test;
    table.libsvm.bytes_max = options.bytes_max;
    PS_RETURN_IF_ERROR(Annotate(TakeBaseOf(model, table.libsvm), absl::StrCat("dataset \"", spec.text, "\"")));
    return LoadLibsvm(path[0], path[1], table.libsvm);
  }
  return LoadIdx({.images = path[0], .labels = path[1], .test_images = path[2], .test_labels = path[3]}, 0,
                 options.bytes_max);
}

// kAuto decided: tables hold numbers in any units; pixels and synthetic samples have a common scale already.
Normalize ChooseNormalize(const DatasetSpec& spec, Normalize wanted) {
  if (wanted != Normalize::kAuto) return wanted;
  return spec.format == "csv" || spec.format == "libsvm" ? Normalize::kStandard : Normalize::kNone;
}

absl::StatusOr<UnscaledSplits> LoadUnscaledFor(const TrainedWith& model, const DatasetOptions& options) {
  PS_RETURN_IF_ERROR(ValidateDatasetOptions(options));
  PS_ASSIGN_OR_RETURN(const DatasetSpec spec, ParseDatasetSpec(options.dataset));
  PS_ASSIGN_OR_RETURN(RawSplits raw, LoadRaw(spec, options, model));
  absl::StatusOr<UnscaledSplits> splits = CutSplits(std::move(raw), ChooseNormalize(spec, options.normalize), options);
  if (!splits.ok()) return Annotate(splits.status(), absl::StrCat("dataset \"", options.dataset, "\""));
  splits->sparse = spec.format == "libsvm";
  return splits;
}

}  // namespace

std::vector<std::string> NamedFiles(const DatasetOptions& options) {
  const absl::StatusOr<DatasetSpec> spec = ParseDatasetSpec(options.dataset);
  if (!spec.ok()) return {};
  absl::StatusOr<std::vector<std::string>> paths = FindPaths(*spec, options.data_dir);
  if (!paths.ok()) return {};
  paths->resize(spec->paths.size());
  return *std::move(paths);
}

absl::Status ValidateDatasetOptions(const DatasetOptions& options) {
  Problems problems;
  const absl::StatusOr<DatasetSpec> spec = ParseDatasetSpec(options.dataset);
  problems.Check(spec.status());
  if (spec.ok()) {
    problems.Check(spec->format == "synthetic" ? ParseSynthetic(*spec, options.bytes_max).status()
                                               : ParseTableOptions(*spec).status());
  }
  if (spec.ok() && options.own && (spec->format == "synthetic" || spec->format == "function")) {
    problems.Check(false, "--data=own: --dataset=", options.dataset,
                   " is made from --seed, and so the same on all workers; expected one of files");
  }
  problems.Check(options.validation_split >= 0 && options.validation_split < 1,
                 "--validation_split=", options.validation_split, ": expected 0 or more, below 1");
  problems.Check(options.crop >= 0, "--crop=", options.crop, ": expected 0 (none) or more");
  problems.Check(options.samples_per_class >= 0, "--samples_per_class=", options.samples_per_class,
                 ": expected 0 (all) or more");
  return problems.ToStatus();
}

std::string FeaturesHint(const std::string& dataset, int64_t features, int64_t inputs) {
  if (!dataset.starts_with("libsvm:") || features == inputs) return "";
  if (features > inputs) {
    return absl::StrCat(", as the largest index says; ,features=", inputs, " names the first line that has it");
  }
  return absl::StrCat("; add ,features=", inputs,
                      " if the others are 0, and ,zero_based=yes if indices count from 0 and no line has index 0");
}

absl::StatusOr<UnscaledSplits> LoadUnscaled(const DatasetOptions& options) { return LoadUnscaledFor({}, options); }

absl::StatusOr<DataSplits> LoadDataset(const DatasetOptions& options, const TrainedWith& model) {
  PS_ASSIGN_OR_RETURN(UnscaledSplits unscaled, LoadUnscaledFor(model, options));
  const std::string context = absl::StrCat("dataset \"", options.dataset, "\"");
  PS_RETURN_IF_ERROR(Annotate(TakeClassesOf(model, unscaled.train), context));
  PS_RETURN_IF_ERROR(Annotate(TakeClassesOf(model, unscaled.validation), context + ": validation split"));
  if (unscaled.test.has_value()) {
    PS_RETURN_IF_ERROR(Annotate(TakeClassesOf(model, *unscaled.test), context + ": test split"));
  }
  if (model.scaling.has_value()) {
    const DatasetContent& train = unscaled.train;
    const absl::Status fits = CheckScalingFits(*model.scaling, train.features, train.classes > 0);
    if (!fits.ok()) {
      const auto inputs = static_cast<int64_t>(model.scaling->features.offset.size());
      return InvalidArgument(context, ": ", fits.message(), FeaturesHint(options.dataset, train.features, inputs));
    }
  }
  PS_ASSIGN_OR_RETURN(Scaling scaling,
                      Annotate(model.scaling.has_value() ? absl::StatusOr<Scaling>(*model.scaling)
                                                         : FindScaling(unscaled.train, unscaled.normalize),
                               context));
  return Annotate(ScaleSplits(std::move(unscaled), std::move(scaling), options.bytes_max), context);
}

}  // namespace ps
