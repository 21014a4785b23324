// What gradients are applied with: the optimizer, its hyperparameters, and how gradients are clipped. The servers'
// flags say it, or, with --optimizer=from_worker, the first worker that joins (OptimizerSettings, in ps.proto); both
// are checked here, by the same rules.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "common/clipping.h"
#include "common/optimizers/hyperparameters.h"
#include "common/problems.h"
#include "ps/v1/ps.pb.h"
#include "server/modes/mode_options.h"

namespace ps {

// As the flag --optimizer: the servers have none of their own.
inline constexpr char kFromWorker[] = "from_worker";

// "sgd, … lamb, or from_worker": what the flag may be, for help and messages.
std::string OptimizerFlagChoices();

struct OptimizerSetup {
  std::string optimizer = "sgd";
  Hyperparameters hyperparameters;
  ClipOptions clip;
};

// Notes every problem of its parts, by flag, and of it with this mode on so many shards. Nothing is asked of
// kFromWorker.
void ValidateOptimizerSetup(const OptimizerSetup& setup, const ModeOptions& mode, uint32_t num_shards,
                            Problems& problems);

// The flags that it stands for, and their values as text: of hyperparameters those that the optimizer uses. Of
// kFromWorker there is only the name.
std::map<std::string, std::string> SettingsOf(const OptimizerSetup& setup);

// What a message says; what it does not name has its default. INVALID_ARGUMENT names every problem, one a line.
absl::StatusOr<OptimizerSetup> SetupOf(const v1::OptimizerSettings& message, const ModeOptions& mode,
                                       uint32_t num_shards);
v1::OptimizerSettings MessageOf(const OptimizerSetup& setup);

}  // namespace ps
