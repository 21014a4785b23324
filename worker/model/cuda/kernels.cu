#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "worker/model/cuda/kernels.h"

namespace ps::cuda {
namespace {

constexpr int kThreads = 256;
// Enough blocks to fill any card; what is more is done in turns.
constexpr int64_t kBlocksMax = 4096;

unsigned int Blocks(int64_t work) {
  const int64_t blocks = (work + kThreads - 1) / kThreads;
  return static_cast<unsigned int>(blocks < kBlocksMax ? blocks : kBlocksMax);
}

// For an index of type int64_t that runs over [0, n), all threads of the grid together.
#define PS_GRID_FOR(i, n)                                                                                 \
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, ps_all = (n); i < ps_all; \
       i += static_cast<int64_t>(blockDim.x) * gridDim.x)

template <Activation activation>
__device__ float Activate(float z) {
  if constexpr (activation == Activation::kRelu) return z < 0.0F ? 0.0F : z;  // NaN stays.
  if constexpr (activation == Activation::kSigmoid) return 1.0F / (1.0F + expf(-z));
  if constexpr (activation == Activation::kTanh) return tanhf(z);
  return z;
}

// dx · activation'(y). Selects where the CPU does: an infinite dx where a relu was off is 0, not NaN.
template <Activation activation>
__device__ float TimesDerivative(float dx, float y) {
  if constexpr (activation == Activation::kRelu) return y > 0.0F ? dx : 0.0F;
  if constexpr (activation == Activation::kSigmoid) return dx * (y * (1.0F - y));
  if constexpr (activation == Activation::kTanh) return dx * (1.0F - y * y);
  return dx;
}

template <Activation activation>
__global__ void ActivationKernel(float* y, int64_t n) {
  PS_GRID_FOR(i, n) y[i] = Activate<activation>(y[i]);
}

template <Activation activation>
__global__ void DerivativeKernel(const float* y, float* dx, int64_t n) {
  PS_GRID_FOR(i, n) dx[i] = TimesDerivative<activation>(dx[i], y[i]);
}

// Thread (column, row group) of a block adds rows group, group + kRowGroups, …; then the groups are added in order.
constexpr int kColumns = 32;
constexpr int kRowGroups = 16;

__global__ void ColumnSumsKernel(const float* matrix, float* sums, int64_t rows, int64_t columns) {
  __shared__ float parts[kRowGroups][kColumns];
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns; first < columns;
       first += static_cast<int64_t>(gridDim.x) * kColumns) {
    const int64_t column = first + threadIdx.x;
    float sum = 0.0F;
    if (column < columns) {
      for (int64_t row = threadIdx.y; row < rows; row += kRowGroups) sum += matrix[row * columns + column];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
      for (int group = 1; group < kRowGroups; ++group) sum += parts[group][threadIdx.x];
      sums[column] = sum;
    }
    __syncthreads();
  }
}

// A block of kLossThreads has one sample at a time. Reductions are a tree over the threads, the same in every run.
constexpr int kLossThreads = 128;

template <typename T, typename Combine>
__device__ T Reduce(T value, T* parts, Combine combine) {
  parts[threadIdx.x] = value;
  __syncthreads();
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  const T result = parts[0];
  __syncthreads();
  return result;
}

struct Largest {
  float value;
  int64_t position;  // The first one's, where several are equal.
};

// What is not a number is larger than any, and at no position: where there is one, no output is the largest.
__device__ Largest Larger(Largest a, Largest b) {
  if (isnan(a.value) || isnan(b.value)) return {NAN, -1};
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.position < b.position ? a : b;
}

__device__ Largest FindLargest(const float* z, int64_t classes, Largest* parts) {
  Largest mine = {-INFINITY, classes};
  for (int64_t k = threadIdx.x; k < classes; k += kLossThreads) mine = Larger(mine, {z[k], k});
  return Reduce(mine, parts, Larger);
}

__device__ double Sum(double value, double* parts) {
  return Reduce(value, parts, [](double a, double b) { return a + b; });
}

// Each is called by a block, for one sample; it writes the gradient times `scale` to dz, unless that is null, and
// returns the loss. The formulas are those of cpu_backend.cc.

__device__ double SoftmaxCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale,
                                      float largest, double* parts) {
  double sum = 0;
  for (int64_t k = threadIdx.x; k < classes; k += kLossThreads) sum += static_cast<double>(expf(z[k] - largest));
  sum = Sum(sum, parts);
  if (dz != nullptr) {
    const auto total = static_cast<float>(sum);
    for (int64_t k = threadIdx.x; k < classes; k += kLossThreads) {
      dz[k] = scale * (expf(z[k] - largest) / total - (k == label ? 1.0F : 0.0F));
    }
  }
  return log(sum) - (static_cast<double>(z[label]) - static_cast<double>(largest));
}

__device__ double SigmoidCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale,
                                      double* parts) {
  double sum = 0;
  for (int64_t k = threadIdx.x; k < classes; k += kLossThreads) {
    const float y = k == label ? 1.0F : 0.0F;
    const float e = expf(-fabsf(z[k]));
    sum += static_cast<double>(fmaxf(z[k], 0.0F)) - static_cast<double>(z[k]) * static_cast<double>(y) +
           static_cast<double>(log1pf(e));
    if (dz != nullptr) dz[k] = scale * ((z[k] >= 0.0F ? 1.0F / (1.0F + e) : e / (1.0F + e)) - y);
  }
  return Sum(sum, parts);
}

__device__ double MeanSquaredError(const float* z, int32_t label, float* dz, int64_t classes, float scale,
                                   double* parts) {
  double sum = 0;
  for (int64_t k = threadIdx.x; k < classes; k += kLossThreads) {
    const float error = z[k] - (k == label ? 1.0F : 0.0F);
    sum += static_cast<double>(error) * static_cast<double>(error);
    if (dz != nullptr) dz[k] = scale * 2.0F * error / static_cast<float>(classes);
  }
  return Sum(sum, parts) / static_cast<double>(classes);
}

template <Loss loss>
__global__ void LossKernel(const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                           int64_t classes, SampleLoss* samples) {
  __shared__ Largest largest_parts[kLossThreads];
  __shared__ double sum_parts[kLossThreads];
  const float scale = 1.0F / static_cast<float>(batch);
  for (int64_t sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    const float* z = outputs + sample * classes;
    float* dz = d_outputs == nullptr ? nullptr : d_outputs + sample * classes;
    const int32_t label = labels[sample];
    const Largest largest = FindLargest(z, classes, largest_parts);
    double value = 0;
    if constexpr (loss == Loss::kSoftmaxCrossEntropy) {
      value = SoftmaxCrossEntropy(z, label, dz, classes, scale, largest.value, sum_parts);
    } else if constexpr (loss == Loss::kSigmoidCrossEntropy) {
      value = SigmoidCrossEntropy(z, label, dz, classes, scale, sum_parts);
    } else {
      value = MeanSquaredError(z, label, dz, classes, scale, sum_parts);
    }
    if (threadIdx.x == 0) samples[sample] = {value, largest.position == label ? 1 : 0};
  }
}

__global__ void SquaredErrorKernel(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                                   SampleLoss* samples) {
  const float scale = 1.0F / static_cast<float>(batch);
  PS_GRID_FOR(sample, batch) {
    const float error = outputs[sample] - targets[sample];
    samples[sample] = {static_cast<double>(error) * static_cast<double>(error), 0};
    if (d_outputs != nullptr) d_outputs[sample] = scale * 2.0F * error;
  }
}

__global__ void SumSamplesKernel(const SampleLoss* samples, int64_t batch, LossSums* sums) {
  __shared__ double loss_parts[kLossThreads];
  __shared__ int64_t correct_parts[kLossThreads];
  double loss = 0;
  int64_t correct = 0;
  for (int64_t sample = threadIdx.x; sample < batch; sample += kLossThreads) {
    loss += samples[sample].loss;
    correct += samples[sample].correct;
  }
  loss = Sum(loss, loss_parts);
  correct = Reduce(correct, correct_parts, [](int64_t a, int64_t b) { return a + b; });
  if (threadIdx.x == 0) {
    sums->loss = loss;
    sums->correct = correct;
  }
}

__device__ __nv_bfloat162 RoundPair(float2 pair, __nv_bfloat162 /*type*/) { return __float22bfloat162_rn(pair); }
__device__ __half2 RoundPair(float2 pair, __half2 /*type*/) { return __float22half2_rn(pair); }

// A thread rounds two values at a time, which it reads and writes at once; the last of an odd number is by itself.
template <typename Pair>
__global__ void RoundKernel(const float* values, int64_t count, Pair* rounded) {
  PS_GRID_FOR(i, count / 2) rounded[i] = RoundPair(reinterpret_cast<const float2*>(values)[i], Pair());
  if (count % 2 == 1 && blockIdx.x == 0 && threadIdx.x == 0) {
    const Pair last = RoundPair(make_float2(values[count - 1], 0.0F), Pair());
    reinterpret_cast<decltype(last.x)*>(rounded)[count - 1] = last.x;
  }
}

// The exponents of a word of one float, or of two elements: where all bits of one are set, the value is not finite.
struct Exponents {
  uint32_t low;
  uint32_t high;
};

__device__ bool HasNotFinite(uint32_t word, Exponents exponents) {
  return (word & exponents.low) == exponents.low || (word & exponents.high) == exponents.high;
}

// A thread reads groups of four words at once; words and an odd element of two bytes that are left are one thread's
// each. All that write to `found` write the same.
__global__ void FindNotFiniteKernel(const uint32_t* words, int64_t count, Exponents exponents, const uint16_t* odd,
                                    int32_t* found) {
  bool bad = false;
  PS_GRID_FOR(i, count / 4) {
    const uint4 group = reinterpret_cast<const uint4*>(words)[i];
    bad = bad || HasNotFinite(group.x, exponents) || HasNotFinite(group.y, exponents) ||
          HasNotFinite(group.z, exponents) || HasNotFinite(group.w, exponents);
  }
  if (blockIdx.x == 0 && threadIdx.x < count % 4) {
    bad = bad || HasNotFinite(words[count - 1 - threadIdx.x], exponents);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && odd != nullptr) bad = bad || HasNotFinite(*odd, exponents);
  if (bad) *found = 1;
}

// A division is correctly rounded, as the CPU's product is: the batches are the same to the bit.
__device__ float ToFloat(uint8_t byte) { return static_cast<float>(byte) / 255.0F; }
__device__ float ToFloat(float value) { return value; }

template <typename T>
__global__ void GatherKernel(const T* samples, const int32_t* indices, int64_t count, int64_t features, float* x) {
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const T* sample = samples + indices[row] * features;
    for (int64_t i = threadIdx.x; i < features; i += blockDim.x) x[row * features + i] = ToFloat(sample[i]);
  }
}

__global__ void GatherLabelsKernel(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered) {
  PS_GRID_FOR(i, count) gathered[i] = labels[indices[i]];
}

template <typename T>
cudaError_t GatherRows(const T* samples, const int32_t* indices, int64_t count, int64_t features, float* x,
                       cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned int>(count < kBlocksMax ? count : kBlocksMax);
  GatherKernel<<<blocks, kThreads, 0, stream>>>(samples, indices, count, features, x);
  return cudaGetLastError();
}

}  // namespace

cudaError_t ApplyActivation(Activation activation, float* y, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  switch (activation) {
    case Activation::kNone:
      return cudaSuccess;
    case Activation::kRelu:
      ActivationKernel<Activation::kRelu><<<Blocks(n), kThreads, 0, stream>>>(y, n);
      break;
    case Activation::kSigmoid:
      ActivationKernel<Activation::kSigmoid><<<Blocks(n), kThreads, 0, stream>>>(y, n);
      break;
    case Activation::kTanh:
      ActivationKernel<Activation::kTanh><<<Blocks(n), kThreads, 0, stream>>>(y, n);
      break;
  }
  return cudaGetLastError();
}

cudaError_t ApplyDerivative(Activation activation, const float* y, float* dx, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  switch (activation) {
    case Activation::kNone:
      return cudaSuccess;
    case Activation::kRelu:
      DerivativeKernel<Activation::kRelu><<<Blocks(n), kThreads, 0, stream>>>(y, dx, n);
      break;
    case Activation::kSigmoid:
      DerivativeKernel<Activation::kSigmoid><<<Blocks(n), kThreads, 0, stream>>>(y, dx, n);
      break;
    case Activation::kTanh:
      DerivativeKernel<Activation::kTanh><<<Blocks(n), kThreads, 0, stream>>>(y, dx, n);
      break;
  }
  return cudaGetLastError();
}

cudaError_t ColumnSums(const float* matrix, float* sums, int64_t rows, int64_t columns, cudaStream_t stream) {
  if (columns == 0) return cudaSuccess;
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  ColumnSumsKernel<<<static_cast<unsigned int>(blocks < kBlocksMax ? blocks : kBlocksMax), dim3(kColumns, kRowGroups),
                     0, stream>>>(matrix, sums, rows, columns);
  return cudaGetLastError();
}

cudaError_t LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                            int64_t classes, SampleLoss* samples, LossSums* sums, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned int>(batch < kBlocksMax ? batch : kBlocksMax);
  const auto run = [&](auto kernel) {
    kernel<<<blocks, kLossThreads, 0, stream>>>(outputs, labels, d_outputs, batch, classes, samples);
  };
  switch (loss) {
    case Loss::kSoftmaxCrossEntropy:
      run(LossKernel<Loss::kSoftmaxCrossEntropy>);
      break;
    case Loss::kSigmoidCrossEntropy:
      run(LossKernel<Loss::kSigmoidCrossEntropy>);
      break;
    case Loss::kMse:
      run(LossKernel<Loss::kMse>);
      break;
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  SumSamplesKernel<<<1, kLossThreads, 0, stream>>>(samples, batch, sums);
  return cudaGetLastError();
}

cudaError_t SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                         SampleLoss* samples, LossSums* sums, cudaStream_t stream) {
  if (batch == 0) return cudaSuccess;
  SquaredErrorKernel<<<Blocks(batch), kThreads, 0, stream>>>(outputs, targets, d_outputs, batch, samples);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  SumSamplesKernel<<<1, kLossThreads, 0, stream>>>(samples, batch, sums);
  return cudaGetLastError();
}

cudaError_t Round(const float* values, int64_t count, WireType type, void* rounded, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned int blocks = Blocks((count + 1) / 2);
  if (type == WireType::kBfloat16) {
    RoundKernel<<<blocks, kThreads, 0, stream>>>(values, count, static_cast<__nv_bfloat162*>(rounded));
  } else {
    RoundKernel<<<blocks, kThreads, 0, stream>>>(values, count, static_cast<__half2*>(rounded));
  }
  return cudaGetLastError();
}

cudaError_t FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found, cudaStream_t stream) {
  if (const cudaError_t cleared = cudaMemsetAsync(found, 0, sizeof(*found), stream); cleared != cudaSuccess) {
    return cleared;
  }
  if (count == 0) return cudaSuccess;
  Exponents exponents = {0x7F800000U, 0x7F800000U};
  if (type == WireType::kBfloat16) exponents = {0x7F80U, 0x7F800000U};
  if (type == WireType::kFloat16) exponents = {0x7C00U, 0x7C000000U};
  const bool halves = type != WireType::kFloat32;
  const int64_t words = halves ? count / 2 : count;
  const uint16_t* const odd = halves && count % 2 == 1 ? static_cast<const uint16_t*>(values) + count - 1 : nullptr;
  FindNotFiniteKernel<<<Blocks(words / 4 + 1), kThreads, 0, stream>>>(static_cast<const uint32_t*>(values), words,
                                                                      exponents, odd, found);
  return cudaGetLastError();
}

cudaError_t Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x,
                   cudaStream_t stream) {
  return GatherRows(samples, indices, count, features, x, stream);
}
cudaError_t Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x,
                   cudaStream_t stream) {
  return GatherRows(samples, indices, count, features, x, stream);
}
cudaError_t Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered,
                   cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  GatherLabelsKernel<<<Blocks(count), kThreads, 0, stream>>>(labels, indices, count, gathered);
  return cudaGetLastError();
}

}  // namespace ps::cuda
