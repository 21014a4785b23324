// What the file of a trained model says of the data that it was trained on: whoever uses the model must scale features
// in the same way, and know which label each output stands for.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/data/normalize.h"

namespace ps {

struct TrainedWith {
  std::optional<Scaling> scaling;    // Unset: the file does not say.
  std::vector<double> class_labels;  // What class 0, 1 ... is called, ascending; empty: a regression, or not said.
  // The number of the first feature in libsvm files, 0 or 1; unset: it was trained on others, or the file does not say.
  std::optional<int32_t> first_index;
};

// For the metadata of a saved model: Scaling::Metadata; of classes `class_labels`, a JSON array; and of features that
// are numbered (libsvm) `zero_based`, yes or no.
std::map<std::string, std::string> DataMetadata(const Scaling& scaling, const Dataset& train);

// What that gave. INVALID_ARGUMENT names the entry that is there and is no such thing.
absl::StatusOr<TrainedWith> ParseDataMetadata(const std::map<std::string, std::string>& metadata);

// Gives the samples the classes of the model: by the labels that their own classes have. Of integer labels that were
// taken for classes, targets again, if the model is of a regression. INVALID_ARGUMENT, naming the sample, if it has a
// label that the model was not trained on.
absl::Status TakeClassesOf(const TrainedWith& model, DatasetContent& content);

// INVALID_ARGUMENT if it is a scaling of other samples than of so many features, and of classes or a regression.
absl::Status CheckScalingFits(const Scaling& scaling, int64_t features, bool classes);

// What each class is called: `names`, or their numbers where it is empty.
std::vector<double> ClassLabels(int32_t classes, const std::vector<double>& names);
// "10, 20, 30", or the first few of many.
std::string ToString(const std::vector<double>& class_labels);

}  // namespace ps
