// What a worker makes ready on its own machine before it joins a job.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "ps/data_summary.h"
#include "worker/train/initial_weights.h"
#include "worker/train/options.h"
#include "worker/train/training_records.h"

namespace ps {

struct Preparation {
  std::unique_ptr<MetricsWriter> metrics;    // Not begun.
  std::unique_ptr<TrainingRecords> records;  // Not begun.
  Layout layout;                             // The model's, with the factors of its groups.
  InitialWeights initial;                    // The weights of --init_weights; without it they are empty.
  ModelOptions model;                        // The options', and what they leave to the file of --init_weights.
  // With --data=own nothing but the scaling's kind is here until the other workers' data are known: what was read is in
  // the next, and `summary` is what they are told of it.
  DataSplits data;
  std::optional<UnscaledSplits> own;
  DataSummary summary;
  DeviceOptions device;  // The device that was found: never `auto`.
};

// Everything that can fail on this machine alone fails here: the files, the data, the device, and whether the model
// fits the data. The errors name the flag or the file. Logs what it finds.
absl::StatusOr<Preparation> Prepare(const WorkerOptions& options);

// INVALID_ARGUMENT, naming --model or --loss, if the network cannot learn from samples of so many features and classes
// (0: a regression), which are those of the dataset of this name.
absl::Status CheckModelFits(const ModelOptions& model, const std::string& dataset, int64_t features, int32_t classes);

// Warns where training begins with the weights of a model that was trained on other labels, each output of which now
// means another one, or on data that were scaled in another way.
void TellOtherData(const DataSplits& data, const InitialWeights& weights);

// What must be the same on all workers, so that the run is one experiment: by flag, the value in the flag's words.
// `initial` are the values of --init_weights, if that is given. Data that are a worker's own have no part in it.
std::map<std::string, std::string> Experiment(const WorkerOptions& options, const DataSplits& data,
                                              const Values& initial);

}  // namespace ps
