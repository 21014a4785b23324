// Errors of CUDA's libraries as a status that has the call, the file and the line.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ps::cuda {

inline absl::Status ToStatus(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text =
      absl::StrCat(call, " at ", file, ":", line, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  // An error of a call, not of the device, would else be found by the next kernel's launch.
  (void)cudaGetLastError();
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

inline absl::Status ToStatus(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(call, " at ", file, ":", line, ": ", cublasLtGetStatusString(status), " (",
                                        cublasLtGetStatusName(status), ")");
  return status == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(text) : absl::InternalError(text);
}

}  // namespace ps::cuda

#define PS_CUDA_STATUS(call) ::ps::cuda::ToStatus((call), #call, __FILE_NAME__, __LINE__)
#define PS_CUDA_RETURN_IF_ERROR(call) PS_RETURN_IF_ERROR(PS_CUDA_STATUS(call))
