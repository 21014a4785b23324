// The losses on the CPU. See Backend::LossAndGradient, SquaredError and enum Loss.
#pragma once

#include "worker/model/backend.h"

namespace ps {

LossSums CpuLossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                            int64_t classes);
LossSums CpuSquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch);

}  // namespace ps
