// --eval_only and --predict: what the weights of --init_weights are worth, without servers and without training.
#pragma once

#include <optional>

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "worker/evaluator.h"
#include "worker/options.h"

namespace ps {

struct EvaluatedWeights {
  std::optional<Evaluation> test;  // Unset: the test split has no labels (--predict).
  uint64_t version = 0;            // As the file or the checkpoint says; 0: it does not.
};

// Evaluates them on the test split, and on the validation split if there is one, as a lead does at the end: with a line
// to the log and an `eval` event; then writes what --predict asks for. INVALID_ARGUMENT naming all that is wrong with
// the options (ValidateWorkerOptions) before anything else is done. Errors name the flag, file or tensor. `flags` go
// into the `start` event.
absl::StatusOr<EvaluatedWeights> EvaluateOnly(const WorkerOptions& options, const nlohmann::ordered_json& flags);

}  // namespace ps
