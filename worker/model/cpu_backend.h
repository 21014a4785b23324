// The backend on the CPU, with oneDNN.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/model/backend.h"

namespace ps {

// INVALID_ARGUMENT, naming --threads, if threads is not from 1 to 1024.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads);

}  // namespace ps
