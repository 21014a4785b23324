// What gradients are applied with: the optimizer, its hyperparameters, and how gradients are clipped. The servers'
// flags say it, or, with --optimizer=from_worker, the first worker that joins (OptimizerSettings, in ps.proto); both
// are checked here, by the same rules.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clipping.h"
#include "common/optimizers/hyperparameters.h"
#include "common/optimizers/optimizer.h"
#include "common/problems.h"
#include "common/proto_values.h"
#include "common/schedule.h"
#include "common/status.h"
#include "ps/v1/ps.pb.h"
#include "server/config/mode_options.h"

namespace ps {

// A value of --optimizer: the servers have no optimizer of their own.
inline constexpr char kFromWorker[] = "from_worker";

// Another value: workers take steps of their own, with optimizers that they alone know.
inline constexpr char kLocal[] = "local";

// "sgd, … lamb, from_worker or local": what the flag may be, for help and messages.
std::string OptimizerFlagChoices();

struct OptimizerSetup {
  std::string optimizer = "sgd";
  Hyperparameters hyperparameters;  // The outer ones are the mode's.
  ClipOptions clip;
  std::string outer = {};   // The outer optimizer, if operators may see and set its hyperparameters; else empty.
  GroupValues groups = {};  // Only a worker brings them. Those at the end that differ in nothing are left out.
};

// The setup in this mode.
OptimizerSetup MakeSetup(const std::string& optimizer, const Hyperparameters& hyperparameters, const ClipOptions& clip,
                         const ModeOptions& mode);

// What servers apply gradients with. For kFromWorker, until workers bring theirs, and kLocal it is one that never does.
std::unique_ptr<Optimizer> MakeGradientOptimizer(const OptimizerSetup& setup);
// What servers apply differences of weights with.
std::unique_ptr<Optimizer> MakeOuter(const ModeOptions& mode, uint32_t num_workers);

// Notes every problem by flag: those of the setup's parts, and those that it has with this mode on so many shards.
// kFromWorker has none, and kLocal only with the mode.
void ValidateOptimizerSetup(const OptimizerSetup& setup, const ModeOptions& mode, uint32_t num_shards,
                            Problems& problems);

// The flags that the setup stands for, and their values as text; hyperparameters that the optimizer does not use are
// left out. For kFromWorker and kLocal there is only the name.
std::map<std::string, std::string> SettingsOf(const OptimizerSetup& setup);

// What a message says; what it does not name has its default. kLocal: a worker has an optimizer that servers do not
// know, for modes in which workers take steps of their own. INVALID_ARGUMENT names every problem, one a line.
absl::StatusOr<OptimizerSetup> SetupOf(const v1::OptimizerSettings& message, const ModeOptions& mode,
                                       uint32_t num_shards);
v1::OptimizerSettings MessageOf(const OptimizerSetup& setup);

// The flags that clip gradients, and the one table of them that the flags' help, the checks and the fingerprint of a
// job's settings are made from. Every mode and optimizer uses them: where workers take steps by themselves, they clip
// their own gradients (LocalSteps, in ps.proto).

// A row of the table: unset, it does nothing; set, it is finite and above 0.
struct ClipFlag {
  std::string flag;  // Its name, without dashes.
  std::optional<float> ClipOptions::*field = nullptr;
  std::string help;
};

const std::vector<ClipFlag>& ClipFlags();
// The help of one field's flag.
std::string ClipHelp(std::optional<float> ClipOptions::*field);

// What a message holds. INVALID_ARGUMENT names every problem, one a line: a name that is unknown, that neither
// optimizer uses, that cannot change or that comes twice; a value out of its range; or that the message is empty.
absl::StatusOr<HyperparameterValues> CheckValues(const HyperparameterMessages& messages, const OptimizerSetup& setup);

// INVALID_ARGUMENT, naming every problem and its group, one a line, if a push cannot tell this (PushRequest.groups).
absl::Status CheckToldGroups(const GroupMessages& messages, const OptimizerSetup& setup);

// The hyperparameters that the optimizer uses.
HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const std::string& optimizer);
// The same, and those of the outer optimizer.
HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const OptimizerSetup& setup);

// "learning_rate=0.01 momentum=0.5", and with the schedule, if a change replaces it: "… schedule=constant".
std::string ToString(const HyperparameterValues& values, const std::optional<Schedule>& schedule = {});
// "group 1: beta1=0.8; group 2: beta1=0.7 beta2=0.9"; a group that differs in nothing is left out, and number 0 is
// "all".
std::string ToString(const GroupValues& groups);
// {"learning_rate":0.01,"momentum":0.5}, with the same digits.
nlohmann::ordered_json ToJson(const HyperparameterValues& values);

// Which optimizer a job has: that of the servers' flags, or, with --optimizer=from_worker, that of the first join. A
// worker that names the optimizer that it was written for must name the same one. Pure.
class OptimizerTerms {
 public:
  // `flags`: the servers'; kFromWorker: they have none of their own. `sparse`: pushes carry some elements only.
  OptimizerTerms(const OptimizerSetup& flags, ModeOptions mode, uint32_t num_shards, bool sparse = false);

  bool from_worker() const { return from_worker_; }
  // Each worker has an optimizer of its own, of which nobody knows anything.
  bool leaves_to_workers() const { return setup_.has_value() && setup_->optimizer == kLocal; }
  // Nothing: no join has said it yet.
  const std::optional<OptimizerSetup>& setup() const { return setup_; }

  // INVALID_ARGUMENT, naming all that cannot be; FAILED_PRECONDITION, naming all that differs, or if neither the worker
  // nor anybody else names an optimizer.
  absl::Status CheckSame(const v1::JoinRequest& request) const;
  // Whether it uses norms of whole tensors with what this join says, as far as that can be.
  bool UsesNorms(const v1::JoinRequest& request) const;
  // Takes from a join that was checked what no join has fixed yet.
  void Fix(const v1::JoinRequest& request);
  // The next join says it anew.
  void Reset();

 private:
  const ModeOptions mode_;
  const uint32_t num_shards_;
  const bool only_sgd_;
  const bool from_worker_;
  std::optional<OptimizerSetup> setup_;
};

}  // namespace ps
