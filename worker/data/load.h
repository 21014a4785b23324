// From the name of a dataset to samples ready for training.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "ps/data_summary.h"
#include "worker/data/dataset.h"
#include "worker/data/normalize.h"
#include "worker/data/trained_with.h"

namespace ps {

struct DatasetOptions {
  // fashion-mnist | mnist                         four IDX files, plain or .gz, found by name (see data_dir)
  // synthetic[:samples=N,features=F,classes=C,test=N,noise=X]     made from the seed; needs no files
  // function:sqrt_sin[,samples=N,test=N]          points of a function, drawn from the seed; needs no files
  // idx:IMAGES,LABELS[,TEST_IMAGES,TEST_LABELS]
  // csv:FILE[,TEST_FILE][,label=first|last][,header=auto|yes|no][,task=auto|classification|regression]
  //                                               the label is last by default
  // libsvm:FILE[,TEST_FILE][,features=N][,zero_based=auto|yes|no][,task=auto|classification|regression]
  // Any file may be plain or gzip. formats.h says how each format is read.
  std::string dataset;

  // For fashion-mnist and mnist: the folder of the files, or one that holds them in a folder `fashion-mnist` or `mnist`
  // (or where torchvision puts them, FashionMNIST/raw or MNIST/raw). Empty: /usr/share/datasets/NAME, where Debian's
  // package dataset-fashion-mnist is. For files: where a relative path is looked for after the working folder.
  std::string data_dir;

  // Share of the training samples, in [0, 1), that becomes the validation split.
  double validation_split = 0;

  // Keep the centre crop x crop of square images. 0: no crop.
  int crop = 0;

  // Train on the first so many of each class in file order, class 0 first, then class 1 ... 0: on all, in file order.
  // The test split stays whole.
  int samples_per_class = 0;

  Normalize normalize = Normalize::kAuto;

  // --data=own: no other worker has these samples. So they have no identity, and the classes of libsvm are those of
  // both files' labels until other workers' are known.
  bool own = false;

  // A csv test file may have one column less, or an empty one: no label; and labels of a test file that the training
  // file does not have are none. For predictions.
  bool unlabelled_test = false;

  // It makes synthetic samples, and chooses those for validation.
  uint64_t seed = 1;

  // A file or table whose features would take more memory is refused.
  int64_t bytes_max = int64_t{16} << 30;
};

struct DataSplits {
  Dataset train;
  Dataset validation;  // Empty (size 0) without validation_split.
  Dataset test;
  bool test_is_train = false;    // The dataset has no test set; `test` is the training split.
  bool unlabelled_test = false;  // The labels or targets of `test` mean nothing.
  Scaling scaling;               // What was done to the features and targets of all three.

  // What was read, before any option had an effect on it: numbers of samples, and hashes of samples and labels. Equal
  // on any two workers that read the same samples, whatever their files are called.
  std::string identity;

  DataNotes notes;
};

// Splits of samples as they were read, before statistics of the training samples have changed anything.
struct UnscaledSplits {
  DatasetContent train;
  DatasetContent validation;
  std::optional<DatasetContent> test;      // Unset: there is no test set.
  bool unlabelled_test = false;            // The labels or targets of `test` mean nothing.
  Normalize normalize = Normalize::kNone;  // What is to be done: never kAuto.
  std::string identity;                    // DataSplits says what it is; empty for samples that are a worker's own.
  bool sparse = false;                     // They come from libsvm: features that no line names are 0.
  DataNotes notes;
};

// The files that `dataset` names by their paths, as far as they are there. Those of mnist and fashion-mnist, which are
// found by their names, are not among them.
std::vector<std::string> NamedFiles(const DatasetOptions& options);

// Whether the options make sense, whatever is in the files. INVALID_ARGUMENT naming every problem by its flag, one a
// line.
absl::Status ValidateDatasetOptions(const DatasetOptions& options);

// What to say where the samples of `dataset` have `features` features and a model takes `inputs`, as the end of a
// message: a libsvm file does not tell how many its samples have. Empty for other formats, or if the two are equal.
std::string FeaturesHint(const std::string& dataset, int64_t features, int64_t inputs);

// Crops, then takes samples_per_class, then splits off validation, then normalises all splits by the statistics of the
// training samples left, which keep their order. The same options and files give the same splits on every machine.
// INVALID_ARGUMENT: an option or the content of a file is wrong. NOT_FOUND: a file is missing; the message lists where
// it was looked for. DATA_LOSS: a file is truncated or corrupt. RESOURCE_EXHAUSTED: bytes_max. FAILED_PRECONDITION: a
// file cannot be opened. The message names the file or the option, and is one line unless several options are wrong.
//
// For a model that is trained already, what it was trained with goes before what the files say: its classes, its
// scaling in the place of --normalize, and where indices of libsvm are counted from.
absl::StatusOr<DataSplits> LoadDataset(const DatasetOptions& options, const TrainedWith& model = {});
// The same, but not normalised.
absl::StatusOr<UnscaledSplits> LoadUnscaled(const DatasetOptions& options);

// For --data=own: the summary of the training samples. INVALID_ARGUMENT, naming --normalize, if it would need
// statistics of more than kToldColumnsMax features.
absl::StatusOr<DataSummary> Summarise(const UnscaledSplits& splits);
// This worker's samples, with as many classes as there are together, scaled by the statistics of all training samples.
// INVALID_ARGUMENT also if `of_all` is of other samples than these.
absl::StatusOr<DataSplits> ScaleOwn(UnscaledSplits splits, const DataSummary& of_all, const DatasetOptions& options);

}  // namespace ps
