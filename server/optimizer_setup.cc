#include "server/optimizer_setup.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/optimizers/optimizer.h"
#include "common/text.h"
#include "server/clip_flags.h"
#include "server/hyperparameter_values.h"

namespace ps {
namespace {

// Where each push is a version, no shard's weights are those that the others have at the same time: there is no one
// model that a norm over all of them would be of.
void CheckNormsOverShards(const OptimizerSetup& setup, const ModeOptions& options, uint32_t num_shards,
                          Problems& problems) {
  const std::string mode = CanonicalMode(options.name);
  if (num_shards < 2 || (mode != "asp" && mode != "ssp")) return;
  const auto optimizer = MakeOptimizer(setup.optimizer);
  problems.Check(!optimizer.ok() || !(*optimizer)->uses_trust_ratio(),
                 absl::StrCat("--optimizer=", setup.optimizer, ": in --mode=", options.name,
                              " it needs --num_shards=1: its step depends on the norms of whole tensors, and the "
                              "servers' weights are never of the same pushes"));
  problems.Check(!setup.clip.needs_norms() || mode != "asp" || options.delay_compensation == 0,
                 absl::StrCat("--delay_compensation=", options.delay_compensation,
                              ": with --clip_norm or --clip_tensor_norm it needs --num_shards=1: a compensated "
                              "gradient depends on the weights, which differ between the shards in --mode=asp"));
}

}  // namespace

std::string OptimizerFlagChoices() { return absl::StrCat(absl::StrJoin(OptimizerNames(), ", "), ", or ", kFromWorker); }

void ValidateOptimizerSetup(const OptimizerSetup& setup, const ModeOptions& mode, uint32_t num_shards,
                            Problems& problems) {
  if (setup.optimizer == kFromWorker) return;
  problems.Check(MakeOptimizer(setup.optimizer).ok(),
                 absl::StrCat("--optimizer=", setup.optimizer, ": expected ", OptimizerFlagChoices()));
  for (const HyperparameterInfo& each : HyperparameterTable()) problems.Check(each.Check(setup.hyperparameters));
  ValidateClipOptions(setup.clip, problems);
  CheckNormsOverShards(setup, mode, num_shards, problems);
}

std::map<std::string, std::string> SettingsOf(const OptimizerSetup& setup) {
  if (setup.optimizer == kFromWorker) return {{"optimizer", kFromWorker}};
  std::map<std::string, std::string> settings = ClipSettings(setup.clip);
  settings["optimizer"] = setup.optimizer;
  for (const auto& [name, value] : ValuesOf(setup.hyperparameters, setup.optimizer)) settings[name] = ExactText(value);
  return settings;
}

absl::StatusOr<OptimizerSetup> SetupOf(const v1::OptimizerSettings& message, const ModeOptions& mode,
                                       uint32_t num_shards) {
  if (const auto made = MakeOptimizer(message.optimizer()); !made.ok()) return made.status();
  Problems problems;
  OptimizerSetup setup = {.optimizer = message.optimizer(),
                          .hyperparameters = DefaultHyperparameters(message.optimizer())};
  HyperparameterValues values;
  problems.Read(CheckInitialValues(message.hyperparameters(), setup.optimizer), values);
  setup.hyperparameters = Changed(setup.hyperparameters, values);
  if (message.has_clip_value()) setup.clip.value = message.clip_value();
  if (message.has_clip_tensor_norm()) setup.clip.tensor_norm = message.clip_tensor_norm();
  if (message.has_clip_norm()) setup.clip.norm = message.clip_norm();
  ValidateOptimizerSetup(setup, mode, num_shards, problems);
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return setup;
}

v1::OptimizerSettings MessageOf(const OptimizerSetup& setup) {
  v1::OptimizerSettings message;
  message.set_optimizer(setup.optimizer);
  ToProto(ValuesOf(setup.hyperparameters, setup.optimizer), message.mutable_hyperparameters());
  if (setup.clip.value.has_value()) message.set_clip_value(*setup.clip.value);
  if (setup.clip.tensor_norm.has_value()) message.set_clip_tensor_norm(*setup.clip.tensor_norm);
  if (setup.clip.norm.has_value()) message.set_clip_norm(*setup.clip.norm);
  return message;
}

}  // namespace ps
