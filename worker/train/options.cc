#include "worker/train/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/problems.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr double kMaxEpochs = 1e9;
constexpr int kMaxThreads = 1024;

void CheckBudget(const WorkerOptions& options, Problems& problems) {
  problems.Check(options.batch_size >= 0 && options.batch_size <= kBatchSizeMax, "--batch_size=", options.batch_size,
                 ": expected 1 to ", kBatchSizeMax, ", or full");
  problems.CheckPositive("epochs", options.epochs, kMaxEpochs);
  problems.Check(options.steps >= 0, "--steps=", options.steps, ": expected 0 or more");
  problems.Check(std::isfinite(options.eval_every) && options.eval_every >= 0, "--eval_every=", options.eval_every,
                 ": expected 0 or more");
  problems.Check(options.warm_up_steps >= 0, "warm_up_steps=", options.warm_up_steps, ": expected 0 or more");
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
                 "--predict=", options.predict, ": is also the --init_weights");
  for (const auto& [flag, path] :
       {std::pair("--save_weights", options.save_weights), std::pair("--init_weights", options.init_weights),
        std::pair("--trace_file", options.trace_file), std::pair("--predict", options.predict)}) {
    problems.Check(!SamePath(path, options.metrics_file), flag, "=", path, ": is also the --metrics_file");
  }
  const std::vector<std::string> data = NamedFiles(options.data);
  for (const auto& [flag, path] :
       {std::pair("--save_weights", options.save_weights), std::pair("--metrics_file", options.metrics_file),
        std::pair("--trace_file", options.trace_file), std::pair("--predict", options.predict)}) {
    const auto is_path = [&path = path](const std::string& file) { return SamePath(path, file); };
    problems.Check(std::none_of(data.begin(), data.end(), is_path), flag, "=", path,
                   ": is also a file of the --dataset");
  }
}

constexpr std::array kJobFlags = {"activation",   "batch_size",        "crop",         "data",       "data_dir",
                                  "dataset",      "decay_biases",      "epochs",       "eval_every", "init",
                                  "init_weights", "keep_best",         "loss",         "model",      "normalize",
                                  "param_groups", "samples_per_class", "save_weights", "seed",       "shuffle",
                                  "steps",        "validation_split"};

constexpr size_t kBytesMax = 12 << 10;  // All values together take no more; servers take a little more, with the names.

// Where the second is given, the first is not taken: it says the same in another way, or belongs to the other's
// default.
constexpr std::pair<const char*, const char*> kInstead[] = {{"epochs", "steps"},
                                                            {"steps", "epochs"},
                                                            {"init", "init_weights"},
                                                            {"init_weights", "init"},
                                                            {"data_dir", "dataset"}};

bool GivenOtherwise(const CommandLine& line, const std::string& flag) {
  return std::any_of(std::begin(kInstead), std::end(kInstead),
                     [&](const auto& pair) { return flag == pair.first && line.given.contains(pair.second); });
}

// They come from the wire: of others than these nothing is taken.
bool IsJobFlag(const std::string& flag) {
  return flag == "job" ||
         std::any_of(kJobFlags.begin(), kJobFlags.end(), [&](const char* known) { return flag == known; });
}

}  // namespace

absl::Status ValidateWorkerOptions(const WorkerOptions& options) {
  Problems problems;
  problems.Check(ValidateClientOptions(options.client));
  const absl::Status model = ValidateModelOptions(options.model);
  problems.Check(model);
  // A model that is not valid has no tensors that a group could have.
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

std::map<std::string, std::string> GivenJobFlags(const CommandLine& line) {
  std::map<std::string, std::string> flags;
  size_t bytes = 0;
  for (const char* flag : kJobFlags) {
    if (!line.given.contains(flag)) continue;
    std::string value = FlagValue(flag);
    // What cannot be sent, as a file name that is not UTF-8, a successor has to be given. It is no reason not to join.
    if (!CheckText(flag, value, kBytesMax).ok() || bytes + value.size() > kBytesMax) continue;
    bytes += value.size();
    flags[flag] = std::move(value);
  }
  return flags;
}

absl::Status TakeJobFlags(const ClientOptions& options, CommandLine& line) {
  const bool told_nothing =
      std::none_of(kJobFlags.begin(), kJobFlags.end(), [&](const char* flag) { return line.given.contains(flag); });
  spdlog::info("asking {} for the job", options.server);
  absl::StatusOr<std::map<std::string, std::string>> told = FlagsOfJob(options, /*waits=*/told_nothing);
  // A chief that is silent would be so to the join as well, whose time this is.
  const bool ends = told_nothing || absl::IsCancelled(told.status()) || absl::IsUnavailable(told.status());
  if (!told.ok()) return ends ? told.status() : absl::OkStatus();
  // Which files another worker alone has is of no use to this one.
  const auto data = told->find("data");
  const bool own = data != told->end() && data->second == "own";
  if (own && !line.given.contains("dataset")) {
    return absl::FailedPreconditionError(
        "--data=own: the job's workers train on files of their own; this one needs to be given its --dataset");
  }
  std::erase_if(*told, [&](const auto& entry) {
    return !IsJobFlag(entry.first) || line.given.contains(entry.first) || GivenOtherwise(line, entry.first) ||
           FlagValue(entry.first) == entry.second;
  });
  if (told->empty() && told_nothing) {
    spdlog::info("the job has not begun, or has these flags, too: --dataset={} --model={}", FlagValue("dataset"),
                 FlagValue("model"));
  }
  if (told->empty()) return absl::OkStatus();
  spdlog::info("taken from the job: {}", absl::StrJoin(*told, " ", [](std::string* out, const auto& entry) {
                 absl::StrAppend(out, "--", entry.first, "=", entry.second);
               }));
  const absl::Status taken = SetFlags(*told, line);
  return taken.ok() ? taken
                    : FailedPrecondition("what the job's other workers were started with is not for this program: ",
                                         Message(taken));
}

}  // namespace ps
