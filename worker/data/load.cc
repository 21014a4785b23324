#include <algorithm>
#include <filesystem>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/random.h"
#include "common/status.h"
#include "worker/data/dataset.h"

namespace ps {
namespace {

constexpr uint64_t kTrainStream = 1;
constexpr uint64_t kTestStream = 2;
constexpr uint64_t kSplitStream = 3;
constexpr int64_t kMaxSyntheticValues = int64_t{1} << 32;

absl::StatusOr<DataSplits> ReadBoth(const std::vector<std::string>& files) {
  DataSplits splits;
  absl::StatusOr<Dataset> train = ReadIdx(files[0], files[1]);
  if (!train.ok()) return train.status();
  splits.train = *std::move(train);
  if (files.size() == 2) {
    splits.test = splits.train;
    return splits;
  }
  absl::StatusOr<Dataset> test = ReadIdx(files[2], files[3]);
  if (!test.ok()) return test.status();
  splits.test = *std::move(test);
  if (splits.test.features() != splits.train.features()) {
    return absl::InvalidArgumentError(absl::StrCat(files[2], ": images of ", splits.test.features(),
                                                   " pixels, but those of ", files[0], " have ",
                                                   splits.train.features()));
  }
  if (splits.test.classes() > splits.train.classes()) {
    return absl::InvalidArgumentError(absl::StrCat(files[3], ": label ", splits.test.classes() - 1,
                                                   " does not occur in ", files[1]));
  }
  return splits;
}

absl::StatusOr<DataSplits> LoadNamed(const std::string& name, const std::string& data_dir) {
  namespace fs = std::filesystem;
  const std::vector<std::string> stems = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                          "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};
  std::vector<std::string> folders;
  if (data_dir.empty()) {
    folders = {"/usr/share/datasets/" + name};
  } else {
    folders = {data_dir + "/" + name, data_dir};
  }
  std::error_code error;
  for (const std::string& folder : folders) {
    std::vector<std::string> files;
    for (const std::string& stem : stems) {
      for (const char* ending : {"", ".gz"}) {
        const std::string path = absl::StrCat(folder, "/", stem, ending);
        if (fs::is_regular_file(path, error)) {
          files.push_back(path);
          break;
        }
      }
    }
    if (files.size() == stems.size()) return ReadBoth(files);
  }
  return absl::NotFoundError(
      absl::StrCat("--dataset=", name, ": the files ", stems[0], "[.gz] and so on are not in ",
                   absl::StrJoin(folders, " or "),
                   name == "fashion-mnist" ? " (Debian's package dataset-fashion-mnist has them; else give --data_dir)"
                                           : " (give the folder with --data_dir)"));
}

absl::StatusOr<DataSplits> LoadSynthetic(const std::string& spec, uint64_t seed) {
  SyntheticOptions options;
  int64_t classes = options.classes;
  if (!spec.empty()) {
    for (const auto& part : absl::StrSplit(spec, ',')) {
      const std::vector<std::string> pair = absl::StrSplit(part, '=');
      int64_t* value = pair[0] == "samples"    ? &options.samples
                       : pair[0] == "features" ? &options.features
                       : pair[0] == "classes"  ? &classes
                                               : nullptr;
      if (value == nullptr || pair.size() != 2 || !absl::SimpleAtoi(pair[1], value) || *value < 1) {
        return absl::InvalidArgumentError(absl::StrCat("--dataset=synthetic:", spec,
                                                       ": expected samples=N,features=N,classes=N, each at least 1"));
      }
    }
  }
  if (classes > 65536 || options.samples > INT32_MAX || options.features > kMaxSyntheticValues / options.samples ||
      options.features > kMaxSyntheticValues / classes) {
    return absl::InvalidArgumentError(absl::StrCat("--dataset=synthetic:", spec, ": larger than 2^32 values"));
  }
  options.classes = static_cast<int>(classes);
  DataSplits splits;
  splits.train = MakeSynthetic(options, seed, kTrainStream);
  options.samples = std::max<int64_t>(1, options.samples / 5);
  splits.test = MakeSynthetic(options, seed, kTestStream);
  return splits;
}

absl::StatusOr<DataSplits> LoadWhole(const DatasetOptions& options) {
  const std::string& dataset = options.dataset;
  if (dataset == "fashion-mnist" || dataset == "mnist") return LoadNamed(dataset, options.data_dir);
  if (dataset == "synthetic") return LoadSynthetic("", options.seed);
  if (dataset.rfind("synthetic:", 0) == 0) return LoadSynthetic(dataset.substr(10), options.seed);
  if (dataset.rfind("idx:", 0) == 0) {
    const std::vector<std::string> files = absl::StrSplit(dataset.substr(4), ',');
    if (files.size() == 2 || files.size() == 4) return ReadBoth(files);
    return absl::InvalidArgumentError(
        absl::StrCat("--dataset=", dataset, ": expected idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS]"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--dataset=", dataset, ": expected fashion-mnist, mnist, synthetic[:…] or idx:IMAGES,LABELS"));
}

absl::StatusOr<Dataset> LimitPerClass(const Dataset& dataset, int limit) {
  std::vector<std::vector<int32_t>> by_class(static_cast<size_t>(dataset.classes()));
  for (int32_t i = 0; i < dataset.size(); ++i) {
    auto& members = by_class[static_cast<size_t>(dataset.labels()[static_cast<size_t>(i)])];
    if (members.size() < static_cast<size_t>(limit)) members.push_back(i);
  }
  std::vector<int32_t> indices;
  for (size_t c = 0; c < by_class.size(); ++c) {
    if (by_class[c].size() < static_cast<size_t>(limit)) {
      return absl::InvalidArgumentError(absl::StrCat("--samples_per_class=", limit, ": class ", c, " has only ",
                                                     by_class[c].size(), " samples"));
    }
    indices.insert(indices.end(), by_class[c].begin(), by_class[c].end());
  }
  return dataset.Subset(indices);
}

// Puts the same share of every class aside, chosen by the seed; both parts keep the order of the samples.
void SplitValidation(double share, uint64_t seed, DataSplits* splits) {
  const Dataset& all = splits->train;
  std::mt19937_64 random = MakeRandom(seed, kSplitStream);
  std::vector<std::vector<int32_t>> by_class(static_cast<size_t>(all.classes()));
  for (int32_t i = 0; i < all.size(); ++i) {
    by_class[static_cast<size_t>(all.labels()[static_cast<size_t>(i)])].push_back(i);
  }
  std::vector<bool> aside(static_cast<size_t>(all.size()), false);
  for (auto& members : by_class) {
    const auto count = static_cast<size_t>(share * static_cast<double>(members.size()));
    for (size_t i = 0; i < count; ++i) {
      std::swap(members[i], members[i + UniformBelow(random, members.size() - i)]);
      aside[static_cast<size_t>(members[i])] = true;
    }
  }
  std::vector<int32_t> train;
  std::vector<int32_t> validation;
  for (int32_t i = 0; i < all.size(); ++i) (aside[static_cast<size_t>(i)] ? validation : train).push_back(i);
  splits->validation = all.Subset(validation);
  splits->train = all.Subset(train);
}

}  // namespace

absl::StatusOr<DataSplits> LoadDataset(const DatasetOptions& options) {
  if (!(options.validation_split >= 0 && options.validation_split < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--validation_split=", options.validation_split, ": expected 0 or more, below 1"));
  }
  absl::StatusOr<DataSplits> splits = LoadWhole(options);
  if (!splits.ok()) return splits;
  if (options.crop > 0) {
    for (Dataset* part : {&splits->train, &splits->test}) {
      absl::StatusOr<Dataset> cropped = part->Crop(options.crop);
      if (!cropped.ok()) return cropped.status();
      *part = *std::move(cropped);
    }
  }
  if (options.samples_per_class > 0) {
    absl::StatusOr<Dataset> limited = LimitPerClass(splits->train, options.samples_per_class);
    if (!limited.ok()) return limited.status();
    splits->train = *std::move(limited);
  }
  if (options.validation_split > 0) SplitValidation(options.validation_split, options.seed, &*splits);
  return splits;
}

}  // namespace ps
