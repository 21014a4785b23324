// Matrix products by cuBLASLt (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api), planned once a shape.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/device.h"

namespace ps::cuda {

// C [m, n] = op(A) · op(B), row-major, where a transposed operand is stored the other way round.
struct MatmulShape {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  bool bias;  // Added to each row, [n].
  bool relu;  // Applied last; only where there is a bias.
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 means the 0 inside.
  auto operator<=>(const MatmulShape&) const = default;
};

// Used by one thread, on one stream: products share a workspace. Each shape's algorithm is the first that cuBLASLt's
// heuristics name, never one that was faster in a trial, and none that adds in an order of chance: so results have the
// same bits on the same card with the same library.
class Matmul {
 public:
  static absl::StatusOr<std::unique_ptr<Matmul>> Create(Math math, cudaStream_t stream);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Queues the product. Matrices begin where cudaMalloc's memory begins (256-byte aligned); no size is 0. `bias` is
  // null if the shape has none.
  absl::Status Multiply(const MatmulShape& shape, const float* a, const float* b, const float* bias, float* c);

 private:
  struct Planned;
  Matmul(Math math, cudaStream_t stream);
  absl::Status MakePlan(const MatmulShape& shape, const float* bias, Planned& plan) const;
  absl::StatusOr<Planned*> Find(const MatmulShape& shape, const float* bias);

  const Math math_;
  const cudaStream_t stream_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<MatmulShape, std::unique_ptr<Planned>> plans_;  // There are at most layers × 3 × batch sizes in use.
};

}  // namespace ps::cuda
