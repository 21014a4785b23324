// A set of samples in memory, ready to be gathered into batches.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// Features are float32 or bytes; so many of either a sample are the most a dataset may have.
inline constexpr int64_t kFeaturesMax = int64_t{1} << 24;
// Samples are counted by int32_t indices.
inline constexpr int64_t kSamplesMax = INT32_MAX;
// Class numbers are below this. More is nearly always a regression target taken for a class.
inline constexpr int32_t kClassesMax = 65536;

// What a dataset is made of; a plain value that loaders fill and transforms change before it becomes a Dataset.
// n is the number of samples. Exactly one of `bytes`, `floats` and `doubles` holds the features, row-major
// [n, features]. What a text says is kept in double until it is scaled (normalize.h): seconds since 1970 or metres of a
// map differ in digits that a float does not have.
struct DatasetContent {
  int64_t features = 0;  // Per sample.
  int32_t classes = 0;   // 0: regression.
  int64_t rows = 0;      // An image's rows; rows * columns == features. 0 if the samples are not known to be images.
  int64_t columns = 0;
  std::vector<uint8_t> bytes;          // A feature is byte / 255.
  std::vector<float> floats;           // A feature is the float itself.
  std::vector<double> doubles;         // The numbers of a text, before they are scaled; a Dataset has none.
  std::vector<int32_t> labels;         // [n], in [0, classes), for classification; else empty.
  std::vector<float> targets;          // [n], for regression; else empty.
  std::vector<double> double_targets;  // In the place of `targets`, as read from a text; a Dataset has none.
  // [classes], ascending integers: what each class is called where the samples come from. Empty: class k is called k.
  std::vector<double> class_labels;
  // The number of the first feature, 0 or 1, where the samples come from numbered ones (libsvm).
  std::optional<int32_t> first_index;

  int64_t size() const {
    return static_cast<int64_t>(classes > 0 ? labels.size() : targets.size() + double_targets.size());
  }
};

// Rounds doubles to floats.
void RoundToFloats(DatasetContent& content);

// Sizes agree, labels are in [0, classes), floats and targets are finite. INVALID_ARGUMENT names what is wrong, and the
// first sample at fault.
absl::Status Check(const DatasetContent& content);

// XXH3 (64 bits, https://github.com/Cyan4973/xxHash) over the shape, the features as stored, the labels and what they
// are called: equal on any two workers that hold the same samples in the same order. Reads all of them.
uint64_t Fingerprint(const DatasetContent& content);

// Immutable. Copies share the samples and cost a pointer. All functions may be called from any thread at once.
class Dataset {
 public:
  Dataset();  // No samples.

  // Takes over `content`, rounded to floats, if Check finds nothing wrong.
  static absl::StatusOr<Dataset> Create(DatasetContent content);

  int64_t size() const { return content_->size(); }
  int64_t features() const { return content_->features; }
  int32_t classes() const { return content_->classes; }  // 0: regression.
  // What class k is called where the samples come from.
  int64_t class_label(int32_t k) const {
    return content_->class_labels.empty() ? k : static_cast<int64_t>(content_->class_labels[static_cast<size_t>(k)]);
  }
  // What each class is called; it is empty where class k is called k.
  const std::vector<double>& class_labels() const { return content_->class_labels; }
  // DatasetContent's.
  std::optional<int32_t> first_index() const { return content_->first_index; }

  // Writes the samples `indices`, each in [0, size()), one after another: features to `features`
  // [indices.size() * features()] and labels to `labels` [indices.size()]. Bytes become byte / 255.0f, correctly
  // rounded. `labels` may be null, and must be for regression.
  void Gather(std::span<const int32_t> indices, float* features, int32_t* labels) const;

  // The targets of the samples `indices` to `targets` [indices.size()]; for regression only.
  void GatherTargets(std::span<const int32_t> indices, float* targets) const;

  // The samples as they are stored, row-major [size(), features()]: one of the two is empty. Valid while any copy of
  // the dataset lives.
  std::span<const uint8_t> bytes() const { return content_->bytes; }
  std::span<const float> floats() const { return content_->floats; }
  std::span<const int32_t> labels() const { return content_->labels; }
  std::span<const float> targets() const { return content_->targets; }

  // The content's fingerprint, which is computed each time.
  uint64_t Fingerprint() const { return ps::Fingerprint(*content_); }

 private:
  explicit Dataset(DatasetContent content);

  std::shared_ptr<const DatasetContent> content_;
};

// What a reader of data guessed or noticed, for the log.
struct DataNote {
  bool warning = false;
  std::string text;  // Names the file.
};
using DataNotes = std::vector<DataNote>;

// The samples `indices` of `content`, each in [0, size()), in that order; repeats are allowed.
DatasetContent Select(const DatasetContent& content, std::span<const int32_t> indices);

// "60000 samples of 784 bytes, 10 classes", for messages.
std::string ToString(const Dataset& dataset);

}  // namespace ps
