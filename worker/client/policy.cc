#include "worker/client/policy.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

absl::StatusOr<LocalSteps::Exchange> ExchangeOf(const v1::LocalSteps& steps) {
  switch (steps.exchange()) {
    case v1::LocalSteps::AVERAGE_WEIGHTS:
      return LocalSteps::Exchange::kAverageWeights;
    case v1::LocalSteps::AVERAGE_GRADIENTS:
      return LocalSteps::Exchange::kAverageGradients;
    case v1::LocalSteps::ELASTIC:
      return LocalSteps::Exchange::kElastic;
    default:
      return absl::FailedPreconditionError(
          absl::StrCat("exchange ", static_cast<int>(steps.exchange()), " is unknown to this client"));
  }
}

absl::Status Check(const LocalSteps& steps) {
  const bool gradients = steps.exchange == LocalSteps::Exchange::kAverageGradients;
  if (steps.steps == 0 && !gradients) return absl::FailedPreconditionError("steps is 0");
  const bool epochs = std::isfinite(steps.average_every_epochs) && steps.average_every_epochs > 0;
  if (gradients && (steps.average_every_steps > 0) == epochs) {
    return absl::FailedPreconditionError("not one of average_every_steps and average_every_epochs is above 0");
  }
  if (steps.exchange == LocalSteps::Exchange::kElastic && !(steps.alpha > 0 && steps.alpha < 1)) {
    return absl::FailedPreconditionError(absl::StrCat("alpha is ", steps.alpha));
  }
  for (const float limit : {steps.clip_value, steps.clip_tensor_norm, steps.clip_norm}) {
    if (!std::isfinite(limit) || limit < 0) {
      return absl::FailedPreconditionError(absl::StrCat("a limit of clipping is ", limit));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<LocalSteps> LocalStepsOf(const v1::LocalSteps& steps) {
  const absl::StatusOr<LocalSteps::Exchange> exchange = ExchangeOf(steps);
  if (!exchange.ok()) return exchange.status();
  LocalSteps local = {.exchange = *exchange,
                      .steps = steps.steps(),
                      .average_every_steps = steps.average_every_steps(),
                      .average_every_epochs = steps.average_every_epochs(),
                      .alpha = steps.alpha(),
                      .optimizer = steps.optimizer(),
                      .clip_value = steps.clip_value(),
                      .clip_tensor_norm = steps.clip_tensor_norm(),
                      .clip_norm = steps.clip_norm()};
  if (const absl::Status status = Check(local); !status.ok()) return status;
  return local;
}

}  // namespace

absl::StatusOr<ModePolicy> PolicyOf(const v1::JoinReply& joined) {
  ModePolicy policy = {.empty_contributions = joined.policy().empty_contributions(),
                       .exact_versions = joined.policy().exact_versions()};
  if (!joined.policy().has_local_steps()) return policy;
  absl::StatusOr<LocalSteps> local = LocalStepsOf(joined.policy().local_steps());
  if (!local.ok()) {
    return Annotate(local.status(), absl::StrCat("--mode=", joined.mode(), ": the server's local_steps"));
  }
  policy.local_steps = *std::move(local);
  return policy;
}

}  // namespace ps
