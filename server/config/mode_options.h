// What a mode is set with: the flags of ps_server of the same names, and the one table that says which mode uses which.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/problems.h"
#include "common/status.h"

namespace ps {

// After how much training local_sgd averages weights while it averages gradients in between; one of the two is set.
struct AverageEvery {
  uint64_t steps = 0;  // Batches of each worker.
  double epochs = 0;
};

// "200" (batches) or "0.5epochs". INVALID_ARGUMENT, naming the flag.
absl::StatusOr<AverageEvery> ParseAverageEvery(const std::string& text);

// What becomes of a running job that loses a worker whose work is not done (--on_worker_loss).
enum class LossAction {
  kFail,      // The job fails.
  kWait,      // Another worker is to take its rank, which is kept for it, in --replacement_timeout.
  kContinue,  // The others go on without it.
};
std::string ToString(LossAction action);  // Gives the flag's value: fail, wait or continue.

struct ModeOptions {
  std::string name = "bsp";    // The flag --mode; also by another name, sync or async.
  std::string on_worker_loss;  // Empty: the mode's default. The one that holds is loss_action().

  // A replacement's push of a step may be another than its predecessor's, which had residuals (--error_feedback).
  bool error_feedback = false;

  // asp
  std::optional<uint64_t> max_staleness;  // A push that is older is STALE; unset: none is too old.
  std::string staleness_lr = "none";      // Or inverse: the learning rate is divided by max(1, staleness).
  float delay_compensation = 0;           // λ; 0: none.

  // ssp
  uint32_t staleness = 3;  // Steps that a worker may be ahead of the slowest.

  // backup
  uint32_t backup_workers = 1;  // Pushes that a step does without.

  // local_sgd and easgd
  uint32_t local_steps = 8;            // Batches between two exchanges; 0, where gradients are averaged: never.
  std::string local_sync = "weights";  // Or gradients.
  std::string average_every;           // How often gradients are averaged (ParseAverageEvery).
  float outer_momentum = 0;            // Nesterov's, with which differences are applied.
  float easgd_alpha = 0;               // 0: 0.9 / num_workers, as in easgd's source.

  // The one that is used.
  float alpha(uint32_t num_workers) const;
  // What happens at a loss: a mode in which everybody waits for everybody fails unless it is told otherwise, the others
  // go on.
  LossAction loss_action() const;
};

// The name without synonyms: bsp for sync, asp for async.
std::string CanonicalMode(const std::string& mode);

// Whether servers apply gradients, and not only differences of weights. The name need not be a mode's.
bool AppliesGradients(const ModeOptions& options);

// Notes every problem of the mode's name and of the options that it uses, by flag.
void ValidateModeOptions(const ModeOptions& options, uint32_t num_workers, Problems& problems);

// The flags that the mode uses, and their values as text: what all servers share.
std::map<std::string, std::string> ModeSettings(const ModeOptions& options, uint32_t num_workers);

struct ModeFlag {
  std::string flag;  // Its name, without dashes.
  bool used = false;
  std::string why_not;  // "--mode=bsp has no staleness"
};
// All of them but `mode`, and whether the mode uses them. The options must be valid.
std::vector<ModeFlag> ModeFlags(const ModeOptions& options);

}  // namespace ps
