// The CUDA backend's own kernels. Each queues on `stream` and returns what the launch returned; pointers are the
// device's. No kernel adds with atomics: sums have one order for given sizes, and results the same bits in every run.
// A size of 0 launches nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ps/wire_type.h"
#include "worker/model/kinds.h"

namespace ps::cuda {

// y [n] = activation(y)
cudaError_t ApplyActivation(Activation activation, float* y, int64_t n, cudaStream_t stream);
// dx [n] = dx ⊙ activation'(·), the derivative taken from its output y [n].
cudaError_t ApplyDerivative(Activation activation, const float* y, float* dx, int64_t n, cudaStream_t stream);
// sums [columns] = the column sums of matrix [rows, columns].
cudaError_t ColumnSums(const float* matrix, float* sums, int64_t rows, int64_t columns, cudaStream_t stream);

// One sample's part of LossSums, in scratch memory of the losses below.
struct SampleLoss {
  double loss;
  int32_t correct;
};
// Backend::LossAndGradient; samples [batch] is scratch memory.
cudaError_t LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                            int64_t classes, SampleLoss* samples, LossSums* sums, cudaStream_t stream);
// Backend::SquaredError; samples [batch] is scratch memory.
cudaError_t SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                         SampleLoss* samples, LossSums* sums, cudaStream_t stream);

// Backend::Round; both begin on a boundary of 8 bytes.
cudaError_t Round(const float* values, int64_t count, WireType type, void* rounded, cudaStream_t stream);

// Backend::FindNotFinite; values begin on a boundary of 16 bytes.
cudaError_t FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found, cudaStream_t stream);

// Backend::Gather.
cudaError_t Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x,
                   cudaStream_t stream);
cudaError_t Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x,
                   cudaStream_t stream);
cudaError_t Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered,
                   cudaStream_t stream);

}  // namespace ps::cuda
