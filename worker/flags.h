// The flags of ps_worker.
#pragma once

#include <nlohmann/json.hpp>
#include "absl/status/statusor.h"
#include "common/flag_parser.h"
#include "worker/train/options.h"

namespace ps {

// Reads the parsed flags and validates the options. INVALID_ARGUMENT naming, one a line, every text that is not what
// its flag takes, every problem that ValidateWorkerOptions finds, and every flag that was given (`line` says which) and
// has no effect.
absl::StatusOr<WorkerOptions> WorkerOptionsFromFlags(const CommandLine& line);

// Every flag with its value, for the `start` event.
nlohmann::ordered_json WorkerFlagValues();

}  // namespace ps
