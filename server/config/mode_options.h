// What a mode is set with: the flags of ps_server of the same names, and the one table that says which mode uses which.
#pragma once

#include <chrono>
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

// "1.5s"; nothing: auto, as long as an overlap hides it. INVALID_ARGUMENT, naming the flag.
absl::StatusOr<std::optional<std::chrono::nanoseconds>> ParseGrace(const std::string& text);

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

  bool hands_out_runs = false;  // --budget=job: a rank's step says nothing of its place in the data.

  // bsp and backup: how a step's learning rate follows the number of workers whose batches make it: not at all (none),
  // in proportion to their share of usual_workers (linear), or to the root of that share (sqrt).
  std::string lr_scale = "none";
  uint32_t usual_workers = 0;  // --num_workers; 0: it is not known, and the learning rate does not change.

  // asp
  std::optional<uint64_t> max_staleness;  // A push that is older is STALE; unset: none is too old.
  std::string staleness_lr = "none";      // Or inverse: the learning rate is divided by max(1, staleness).
  float delay_compensation = 0;           // λ; 0: none.

  // ssp
  uint32_t staleness = 3;  // Steps that a worker may be ahead of the slowest.

  // backup
  uint32_t backup_workers = 1;  // Pushes that a step does without.

  // local_sgd, diloco and easgd
  std::optional<uint32_t> local_steps;  // Batches between two exchanges; unset: batches_per_round().
  std::string local_sync = "weights";   // What local_sgd averages: weights or gradients.
  std::string average_every;            // How often gradients are averaged (ParseAverageEvery).
  float easgd_alpha = 0;                // 0: 0.9 / num_workers, as in easgd's source.

  // diloco; the momentum is also local_sgd's. What is used is outer().
  std::string outer_optimizer = "nesterov";
  std::optional<float> outer_lr;
  std::optional<float> outer_momentum;
  std::string outer_sync = "barrier";       // Or quorum, or async.
  uint32_t quorum = 0;                      // So many pushes make a round; 0: it has to be set, where it is used.
  std::string grace = "0s";                 // How long it waits for more once these are there (ParseGrace).
  std::string outer_weighting = "samples";  // Or uniform.
  std::optional<uint32_t> dn_buffer;        // Unset: num_workers.
  uint32_t fragments = 1;                   // Parts of the model that are exchanged one after the other.
  uint32_t overlap = 0;                     // Batches from a push to the weights that are taken for it.
  float mix = 0;                            // How much of its own weights a worker keeps then.

  // 0, where gradients are averaged: they never are.
  uint32_t batches_per_round() const;
  // How servers step with differences of weights. The modes that have no flags for it add them.
  struct Outer {
    std::string optimizer = "sgd";
    float lr = 1;
    float momentum = 0;
  };
  Outer outer() const;
  // The differences of so many pushes weigh as much as a mean of all, where they are applied one by one.
  uint32_t buffer(uint32_t num_workers) const { return dn_buffer.value_or(num_workers); }
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

// Notes every problem of the mode's name and of the options that it uses, by flag. `num_workers`, here and below: as
// many as the job may have.
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
