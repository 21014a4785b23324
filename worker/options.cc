#include "worker/options.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/problems.h"

namespace ps {
namespace {

constexpr double kMaxEpochs = 1e9;
constexpr int kMaxThreads = 1024;

void CheckBudget(const WorkerOptions& options, Problems& problems) {
  problems.Check(options.batch_size >= 0 && options.batch_size <= kBatchSizeMax,
                 absl::StrCat("--batch_size=", options.batch_size, ": expected 1 to ", kBatchSizeMax, ", or full"));
  problems.CheckPositive("epochs", options.epochs, kMaxEpochs);
  problems.Check(options.steps >= 0, absl::StrCat("--steps=", options.steps, ": expected 0 or more"));
  problems.Check(std::isfinite(options.eval_every) && options.eval_every >= 0,
                 absl::StrCat("--eval_every=", options.eval_every, ": expected 0 or more"));
  problems.Check(options.warm_up_steps >= 0,
                 absl::StrCat("warm_up_steps=", options.warm_up_steps, ": expected 0 or more"));
}

void CheckKeepBest(const WorkerOptions& options, Problems& problems) {
  const std::string flag = absl::StrCat("--keep_best=", options.keep_best, ": ");
  if (options.keep_best.empty()) return;
  if (options.keep_best != "validation") {
    return problems.Check(false, flag + "expected validation, or nothing, which keeps the last weights");
  }
  problems.Check(options.data.validation_split > 0,
                 flag + "expected --validation_split above 0: the best are those with the lowest loss on that split");
  problems.Check(options.eval_every > 0,
                 flag + "expected --eval_every above 0: the best are chosen of those that are evaluated on the way");
}

bool SamePath(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code error;
  return a == b || std::filesystem::weakly_canonical(a, error) == std::filesystem::weakly_canonical(b, error) ||
         std::filesystem::equivalent(a, b, error);
}

// A file that is both would lose what one of its two uses needs.
void CheckFiles(const WorkerOptions& options, Problems& problems) {
  problems.Check(options.predict.empty() || !SamePath(options.predict, options.init_weights),
                 absl::StrCat("--predict=", options.predict, ": is also the --init_weights"));
  for (const auto& [flag, path] :
       {std::pair("--save_weights", options.save_weights), std::pair("--init_weights", options.init_weights),
        std::pair("--predict", options.predict)}) {
    problems.Check(!SamePath(path, options.metrics_file),
                   absl::StrCat(flag, "=", path, ": is also the --metrics_file"));
  }
  const std::vector<std::string> data = NamedFiles(options.data);
  for (const auto& [flag, path] :
       {std::pair("--save_weights", options.save_weights), std::pair("--metrics_file", options.metrics_file),
        std::pair("--predict", options.predict)}) {
    const auto is_path = [&path = path](const std::string& file) { return SamePath(path, file); };
    problems.Check(std::none_of(data.begin(), data.end(), is_path),
                   absl::StrCat(flag, "=", path, ": is also a file of the --dataset"));
  }
}

}  // namespace

absl::Status ValidateWorkerOptions(const WorkerOptions& options) {
  Problems problems;
  problems.Check(ValidateClientOptions(options.client));
  const absl::Status model = ValidateModelOptions(options.model);
  problems.Check(model);
  // Of no model there are no tensors that a group could have.
  if (model.ok()) {
    problems.Check(WithFactors(ModelLayout(options.model), options.param_groups, options.decay_biases).status());
  }
  problems.Check(ValidateDatasetOptions(options.data));
  problems.Check(CheckDeviceOptions(options.device));
  problems.CheckRange("threads", options.device.threads, 1, kMaxThreads);
  problems.Check(ValidatePace(options.pace));
  problems.CheckRange("experiment_staleness", options.delayed_pushes, int64_t{0}, kDelayedPushesMax);
  problems.Check(!options.eval_only || !options.init_weights.empty(),
                 "--eval_only: expected --init_weights, which gives the weights to evaluate");
  problems.Check(options.predict.empty() || !options.init_weights.empty(),
                 "--predict: expected --init_weights, which gives the weights to predict with");
  CheckFiles(options, problems);
  CheckBudget(options, problems);
  CheckKeepBest(options, problems);
  return problems.ToStatus();
}

}  // namespace ps
