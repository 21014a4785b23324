// Where a network computes: the small interface that a device implements.
//
// Memory: `Device` pointers are the device's, `Host` pointers the CPU's; on a CPU they are the same, and copies between
// equal pointers do nothing. All work is queued in order on the backend's one stream and may still be under way when a
// function returns; what it reads must stay until Synchronize (or an event after it) has been waited for. On a CPU the
// work is done when the function returns.
//
// A backend is used by one thread at a time, the one that made it. Matrices are row-major, without padding. Results
// have the same bits on the same device with the same number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/options.h"

namespace ps {

using FloatMemory = std::shared_ptr<float>;

struct LossSums {
  double loss = 0;      // Summed over the samples of the batch.
  int64_t correct = 0;  // Samples whose largest output (the first of equal ones) is the label.
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;

  // Zeroed, 64-byte aligned. RESOURCE_EXHAUSTED if there is not enough.
  virtual absl::StatusOr<FloatMemory> AllocateDevice(int64_t elements) = 0;
  // Memory of the host that the device copies from and to at full speed.
  virtual absl::StatusOr<FloatMemory> AllocateHost(int64_t elements) = 0;
  // True if device memory is the host's.
  virtual bool unified() const = 0;

  virtual absl::Status CopyToDevice(const float* host, float* device, int64_t elements) = 0;
  virtual absl::Status CopyToHost(const float* device, float* host, int64_t elements) = 0;
  // Waits for everything queued.
  virtual absl::Status Synchronize() = 0;

  // y [batch, out] = activation(x [batch, in] · weight [out, in]ᵀ + bias [out])
  virtual absl::Status DenseForward(const float* x, const float* weight, const float* bias, float* y, int64_t batch,
                                    int64_t in, int64_t out, Activation activation) = 0;
  // dx [batch, in] = (dy [batch, out] · weight [out, in]) ⊙ activation'(·), the derivative taken from its output
  // y [batch, in].
  virtual absl::Status DenseBackwardInput(const float* dy, const float* weight, const float* y, float* dx,
                                          int64_t batch, int64_t in, int64_t out, Activation activation) = 0;
  // d_weight [out, in] = dy [batch, out]ᵀ · x [batch, in];  d_bias [out] = column sums of dy, in row order
  virtual absl::Status DenseBackwardWeights(const float* dy, const float* x, float* d_weight, float* d_bias,
                                            int64_t batch, int64_t in, int64_t out) = 0;
  // The loss of outputs [batch, classes] against labels [batch] (host memory), and, unless d_outputs is null, the
  // gradient of its mean over the batch. Waits for the result.
  virtual absl::StatusOr<LossSums> LossAndGradient(Loss loss, const float* outputs, const int32_t* labels,
                                                   float* d_outputs, int64_t batch, int64_t classes) = 0;
};

// On the CPU, with oneDNN. INVALID_ARGUMENT if threads is below 1.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads);

}  // namespace ps
