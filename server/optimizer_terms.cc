#include "server/optimizer_terms.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "server/job_terms.h"

namespace ps {

OptimizerTerms::OptimizerTerms(const OptimizerSetup& flags, ModeOptions mode, uint32_t num_shards, bool sparse)
    : mode_(std::move(mode)),
      num_shards_(num_shards),
      only_sgd_(sparse && AppliesGradients(mode_)),
      from_worker_(flags.optimizer == kFromWorker) {
  if (!from_worker_) setup_ = flags;
}

absl::Status OptimizerTerms::CheckSame(const v1::JoinRequest& request) const {
  if (!request.has_optimizer()) {
    if (!from_worker_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the servers take the optimizer from the workers (--optimizer=", kFromWorker,
                     "), but this worker brings none: start the servers with --optimizer=", OptimizerChoices()));
  }
  const absl::StatusOr<OptimizerSetup> theirs = SetupOf(request.optimizer(), mode_, num_shards_);
  if (!theirs.ok()) return Annotate(theirs.status(), "the worker's optimizer");
  if (from_worker_ && only_sgd_ && theirs->optimizer != "sgd") {
    return absl::FailedPreconditionError(
        absl::StrCat("the worker's optimizer is ", theirs->optimizer,
                     ": with --compress servers apply sgd; --momentum_correction has workers apply momentum"));
  }
  if (!setup_.has_value()) return absl::OkStatus();
  std::map<std::string, std::string> ours = SettingsOf(*setup_);
  const std::map<std::string, std::string> other = SettingsOf(*theirs);
  // Of another optimizer only what both have is compared.
  std::erase_if(ours, [&](const auto& setting) { return !other.contains(setting.first); });
  const std::string differences =
      DifferentSettings(ours, {other.begin(), other.end()}, from_worker_ ? "the job has" : "the servers have");
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the worker's optimizer differs from ",
                                                    from_worker_ ? "the job's: " : "the servers': ", differences));
}

void OptimizerTerms::Fix(const v1::JoinRequest& request) {
  if (!setup_.has_value()) setup_ = *SetupOf(request.optimizer(), mode_, num_shards_);
}

void OptimizerTerms::Reset() {
  if (from_worker_) setup_.reset();
}

}  // namespace ps
