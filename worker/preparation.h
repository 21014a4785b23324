// What a worker makes ready on its own machine before it joins a job.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "worker/initial_weights.h"
#include "worker/options.h"

namespace ps {

struct Preparation {
  std::unique_ptr<MetricsWriter> metrics;  // Not begun.
  Layout layout;                           // The model's, with the factors of its groups.
  InitialWeights initial;                  // Of --init_weights; else empty.
  DataSplits data;
  DeviceOptions device;  // As found: never `auto`.
};

// Everything that can fail on this machine alone fails here: the files, the data, the device, and whether the model
// fits the data. The errors name the flag or the file. Logs what it finds.
absl::StatusOr<Preparation> Prepare(const WorkerOptions& options);

// INVALID_ARGUMENT, naming --model or --loss, if the network cannot learn from samples as `train` has, which are those
// of the dataset of this name.
absl::Status CheckModelFits(const ModelOptions& model, const std::string& dataset, const Dataset& train);

// What must be the same on all workers, so that the run is one experiment: by flag, the value in the flag's words.
// `initial` are the values of --init_weights, if that is given.
std::map<std::string, std::string> Experiment(const WorkerOptions& options, const DataSplits& data,
                                              const Values& initial);

}  // namespace ps
