// A worker's options: read once from the flags, then passed by value.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/flag_parser.h"
#include "ps/client.h"
#include "worker/data/load.h"
#include "worker/model/device.h"
#include "worker/model/options.h"

namespace ps {

// Fields are the flags of the same name, parsed.
struct WorkerOptions {
  ClientOptions client;
  DatasetOptions data;
  ModelOptions model;
  Init init = Init::kHe;
  std::string init_weights;  // Safetensors; instead of init.
  std::string save_weights;  // Safetensors; by the lead.
  int64_t batch_size = 64;   // 0: full.
  double epochs = 1;         // Budget, unless steps is set.
  int64_t steps = 0;
  double eval_every = 0;  // Epochs between the lead's evaluations on the test split; 0: only at the end.
  uint64_t seed = 1;
  bool shuffle = true;
  bool overlap = true;
  DeviceOptions device;
  std::string metrics_file;
  int64_t warm_up_steps = 0;  // Left out of TrainingResult's samples and times. No flag: for benchmarks.
};

// Parses and checks all flags; `line` says which were given: a given flag without effect is a problem, too.
// INVALID_ARGUMENT naming every problem, one a line.
absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags(const CommandLine& line);

// Every flag with its value, for the `start` event.
nlohmann::ordered_json WorkerFlagValues();

}  // namespace ps
