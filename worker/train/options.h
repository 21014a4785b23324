// A worker's options: read once from the flags (flags.h) or filled in by who embeds a trainer, then passed by value.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/flag_parser.h"
#include "common/trace.h"
#include "ps/client.h"
#include "worker/data/load.h"
#include "worker/model/device.h"
#include "worker/model/options.h"
#include "worker/train/pace.h"
#include "worker/train/param_groups.h"

namespace ps {

inline constexpr int64_t kBatchSizeMax = 1 << 24;
inline constexpr int64_t kDelayedPushesMax = 1024;

// Fields are the flags of the same name, parsed, with the flags' defaults.
struct WorkerOptions {
  ClientOptions client = {.server = "127.0.0.1:5000"};
  DatasetOptions data = {.dataset = "fashion-mnist"};
  ModelOptions model = {.widths = {784, 128, 10}};
  // Whoever only uses a model leaves these two to its file, if that says them: set where the flag was not given.
  bool activation_open = false;
  bool loss_open = false;
  Init init = Init::kHe;
  std::vector<ParamGroup> param_groups;
  bool decay_biases = true;
  std::string init_weights;  // Safetensors, or a checkpoint; instead of init.
  bool eval_only = false;    // Nothing is done but to evaluate those weights.
  std::string predict;       // CSV: nothing is done but to write what the network with those says of each sample.
  std::string save_weights;  // Safetensors; by the lead.
  std::string keep_best;     // What is tested and saved at the end: the last weights, or the best on "validation".
  int64_t batch_size = 64;   // 0: full.
  double epochs = 1;         // Budget, unless steps is set.
  int64_t steps = 0;
  double eval_every = 0;  // Epochs between the lead's evaluations on the test split; 0: only at the end.
  bool rejoin = true;     // After it was fenced off.
  uint64_t seed = 1;
  bool shuffle = true;
  bool overlap = true;
  DeviceOptions device;
  std::string metrics_file;
  std::string tensorboard_dir;  // Each rank has a folder of its own there.
  std::string trace_file;
  TracedSteps traced_steps;
  PaceOptions pace;            // The experiment_ flags, and the next.
  int64_t delayed_pushes = 0;  // --experiment_staleness.
  int64_t warm_up_steps = 0;   // Left out of StepTotals. No flag: for benchmarks.
};

// INVALID_ARGUMENT naming every problem, one a line, each by its flag. What is looked at are the options alone, and not
// what files, devices or servers there are.
absl::Status ValidateWorkerOptions(const WorkerOptions& options);

// The flags that the workers of a job have in common: a worker tells the chief its own, and one that joins later takes
// them from there, so that whoever takes a lost worker's place needs no more than the server's address.

// Those of the given flags that another worker of the job would need, as far as they can be told, by name.
std::map<std::string, std::string> GivenJobFlags(const CommandLine& line);

// Takes from the job those of them that were not given, as if they had been. If none was given it waits for the server
// as a join does; else a server that is not there yet is no error: then this worker is among the first, and has been
// told all. Logs what it takes. Errors are of FlagsOfJob; FAILED_PRECONDITION if this program does not know a flag, or
// not such a value.
absl::Status TakeJobFlags(const ClientOptions& options, CommandLine& line);

}  // namespace ps
