// The formats that samples come in. Each loader lives in the file of its name and reads everything into memory, within
// a limit. Errors name the file, and the line where there are lines; no bytes in a file can make a loader crash or
// allocate much more than the file's own content needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/data/spec.h"

namespace ps {

// A dataset as it came, before any crop or split.
struct RawSplits {
  DatasetContent train;
  std::optional<DatasetContent> test;
  bool unlabelled_test = false;  // The test set's labels or targets mean nothing: its file has none.
  DataNotes notes;
};

// Images and labels in IDX files, plain or gzip. Images are unsigned bytes or float32, of two dimensions or more (the
// first counts samples), labels unsigned bytes or int32. There are `classes` classes or, if that is 0, as many as the
// largest training label says. `test_images` and `test_labels` are empty if there is no test set.
// Source: http://yann.lecun.com/exdb/mnist, "the IDX file format".
struct IdxPaths {
  std::string images;
  std::string labels;
  std::string test_images;
  std::string test_labels;
};
absl::StatusOr<RawSplits> LoadIdx(const IdxPaths& paths, int32_t classes, int64_t bytes_max);

enum class Task { kAuto, kClassification, kRegression };

// How integer labels become classes.
enum class LabelMapping {
  kNumber,      // They are class numbers.
  kRank,        // The smallest is class 0, the next one class 1 and so on.
  kRankOfBoth,  // The same, of the labels of both files.
};

// Whether the first line of a table has names.
enum class Header {
  kAuto,  // It has if a field is a name and none a number. NA, null, None, True and the like are no names.
  kYes,   // It has; or, if it has numbers only, a comment before it with as many fields that are names.
  kNo,
};

struct CsvOptions {
  bool label_first = false;
  Header header = Header::kAuto;  // It holds for either file.
  Task task = Task::kAuto;
  bool unlabelled_test = false;  // The test file may have one column less, or an empty one: no label.
  int64_t bytes_max = 0;
};

// Numbers in a text table, one sample a line, plain or gzip. The separator is the first of comma, semicolon and tab
// that the first line has, or the one that a first line "sep=," names. The label is the last field, or the first.
// Numbers may be in double quotes. Empty lines are skipped, as are lines that start with '#'. Features are taken as
// they are. Labels that are all integers are class numbers, from 0 (kAuto); any other label makes it a regression.
// Notes tell how the first line was taken, and warn where numbers in it look like names.
absl::StatusOr<RawSplits> LoadCsv(const std::string& path, const std::string& test_path, const CsvOptions& options);

// What the smallest index of a libsvm file is.
enum class IndexBase {
  kAuto,  // 0 if either file has index 0, else 1.
  kZero,
  kOne,
};

struct LibsvmOptions {
  Task task = Task::kAuto;
  LabelMapping mapping = LabelMapping::kRank;
  IndexBase base = IndexBase::kAuto;
  bool base_of_model = false;   // `base` is what a trained model's file says.
  bool any_test_label = false;  // Test labels that the training file does not have are none. For predictions.
  int64_t features = 0;         // 0: as many as the largest index of either file says.
  int64_t bytes_max = 0;
};

// LABEL [qid:N] INDEX:VALUE ..., one sample a line, plain or gzip. Indices ascend; features that a line does not name
// are 0. '#' starts a comment. qid is read over. A note tells what the indices were counted from.
// Integer labels are ranked, with kRank: the smallest becomes class 0, the next class 1 and so on (-1/+1 becomes 0/1).
// The test file's labels are mapped in the same way, and must occur in the training file. Any other label makes it a
// regression. Source: https://www.csie.ntu.edu.tw/~cjlin/libsvm.
absl::StatusOr<RawSplits> LoadLibsvm(const std::string& path, const std::string& test_path,
                                     const LibsvmOptions& options);

// Samples made up from `seed`: sample i is of class i % classes, and its features are the bytes of that class's centre
// blended with uniform noise, `noise` of it: 0 gives the centre itself, 1 only noise. Options with their defaults:
// samples=10000, features=784, classes=10, test=samples/5 (at least one of each class), noise=0.3.
struct SyntheticOptions {
  int64_t features = 0;
  int64_t classes = 0;
  int64_t samples = 0;
  int64_t test = 0;
  double noise = 0;
};
// INVALID_ARGUMENT names the option whose value is out of range; RESOURCE_EXHAUSTED if the features would take more
// than `bytes_max`.
absl::StatusOr<SyntheticOptions> ParseSynthetic(const DatasetSpec& spec, int64_t bytes_max);
RawSplits MakeSynthetic(const SyntheticOptions& options, uint64_t seed);

// Samples of a known function, for regression: one feature x, and the target f(x). Functions: sqrt_sin,
// y = sqrt(x)·sin(3.14·x/5), x uniform in [0, 20). Options with their defaults: samples=80000, test=0 (no test set).
// INVALID_ARGUMENT names the function that is unknown, or the option whose value is out of range; RESOURCE_EXHAUSTED as
// above.
absl::StatusOr<RawSplits> MakeFunction(const DatasetSpec& spec, uint64_t seed, int64_t bytes_max);

}  // namespace ps
