// Where a network computes: the small interface that a device implements.
//
// Memory: `Device` pointers are the device's, `Host` pointers the CPU's; on a CPU (`unified`) they are the same, and
// copies between equal pointers do nothing. Work is queued, and may still be under way when a function returns: what it
// reads must stay, and what it writes must be left alone, until an event behind it was waited for or Synchronize was
// called. On a CPU the work is done when the function returns.
//
// Order: computation is done in the order in which it was queued. A copy to the device may run beside computation that
// was queued before it, and ends before what is queued after it begins. A copy to the host begins when everything
// queued before it has ended, and runs beside what is queued after it.
//
// Waits end when the device has done its work; one that hangs is its driver's to end. A backend is used by the thread
// that made it, and a thread has one at a time. Matrices are row-major, without padding, and each begins where memory
// of AllocateDevice begins. Results have the same bits on the same device with the same number of threads and the same
// libraries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/wire_type.h"
#include "worker/model/kinds.h"
#include "worker/model/options.h"

namespace ps {

// Memory of a device or of the host; the last owner frees it, and must before the backend ends.
using Memory = std::shared_ptr<std::byte>;
inline float* Floats(const Memory& memory) { return reinterpret_cast<float*>(memory.get()); }

// Computation that is queued again and again. Must end before its backend, and before the memory that the work uses.
class Graph {
 public:
  virtual ~Graph() = default;
  // Queues what `work` queues, which is computation only, and the same each time. A device that can captures it once
  // and launches that from then on.
  virtual absl::Status Run(const std::function<absl::Status()>& work) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  // True if device memory is the host's.
  virtual bool unified() const = 0;

  // Zeroed, 64-byte aligned. RESOURCE_EXHAUSTED if there is not enough.
  virtual absl::StatusOr<Memory> AllocateDevice(int64_t bytes) = 0;
  // What may still be allocated, others on the device not reckoned with.
  virtual absl::StatusOr<int64_t> FreeDeviceBytes() = 0;
  // Memory of the host that the device copies from and to at full speed.
  virtual absl::StatusOr<Memory> AllocateHost(int64_t bytes) = 0;
  // The same memory of the host, made as AllocateHost's is for as long as what is returned lives, which holds it.
  virtual absl::StatusOr<Memory> PinHost(const Memory& memory, int64_t bytes) = 0;
  // The same for memory that begins with a page and is mapped for reading only: nothing can be copied to it.
  // UNIMPLEMENTED where the device cannot.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> PinHostPages(const std::shared_ptr<const std::byte>& pages,
                                                                        int64_t bytes) = 0;

  virtual absl::Status CopyToDevice(const void* host, void* device, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(const void* device, void* host, int64_t bytes) = 0;
  // Waits for everything queued.
  virtual absl::Status Synchronize() = 0;

  // Puts event number `event` ≥ 0 behind all computation, and all copies to the host, that were queued before it; a
  // number that is recorded again is another event. Few and small numbers are expected.
  virtual absl::Status RecordEvent(int event) = 0;
  // Blocks until the device has reached the event, which was recorded.
  virtual absl::Status WaitEvent(int event) = 0;
  // The seconds between two events that were recorded and reached, in the device's time.
  virtual absl::StatusOr<double> SecondsBetween(int from, int to) = 0;

  virtual std::unique_ptr<Graph> MakeGraph() = 0;

  // y [batch, out] = activation(x [batch, in] · weight [out, in]ᵀ + bias [out])
  virtual absl::Status DenseForward(const float* x, const float* weight, const float* bias, float* y, int64_t batch,
                                    int64_t in, int64_t out, Activation activation) = 0;
  // dx [batch, in] = (dy [batch, out] · weight [out, in]) ⊙ activation'(·), the derivative taken from its output
  // y [batch, in].
  virtual absl::Status DenseBackwardInput(const float* dy, const float* weight, const float* y, float* dx,
                                          int64_t batch, int64_t in, int64_t out, Activation activation) = 0;
  // d_weight [out, in] = dy [batch, out]ᵀ · x [batch, in];  d_bias [out] = column sums of dy, in an order of its own
  virtual absl::Status DenseBackwardWeights(const float* dy, const float* x, float* d_weight, float* d_bias,
                                            int64_t batch, int64_t in, int64_t out) = 0;
  // The loss of outputs [batch, classes] against labels [batch], each below classes, to `sums` (device memory), and,
  // unless d_outputs is null, the gradient of its mean over the batch.
  virtual absl::Status LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs,
                                       int64_t batch, int64_t classes, LossSums* sums) = 0;
  // The same for regression: the squared errors of outputs [batch] against targets [batch].
  virtual absl::Status SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                                    LossSums* sums) = 0;
  // rounded [count], elements of two bytes of this type (not kFloat32), = values [count]: each is rounded to the
  // nearest, and, where two are equally near, to the one whose last bit is 0. A value that is not finite, or too large,
  // is not finite after that. Both begin where memory of AllocateDevice begins.
  virtual absl::Status Round(const float* values, int64_t count, WireType type, void* rounded) = 0;
  // *found (device memory) = 1 if any of values [count], elements of this type, is infinite or no number, else 0. They
  // begin where memory of AllocateDevice begins.
  virtual absl::Status FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found) = 0;
  // Rows `indices` [count] of samples [·, features] to x [count, features], bytes as byte / 255; and of labels.
  virtual absl::Status Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features,
                              float* x) = 0;
  virtual absl::Status Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features,
                              float* x) = 0;
  virtual absl::Status Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered) = 0;
};

}  // namespace ps
