// The backend on the CPU, with oneDNN.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/model/backend.h"

namespace ps {

// INVALID_ARGUMENT, naming --threads, if threads is not from 1 to 1024.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads);

// The losses on the CPU. See Backend::LossAndGradient, SquaredError and enum Loss.
LossSums CpuLossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                            int64_t classes);
LossSums CpuSquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch);

}  // namespace ps
