#include "worker/model/cuda/matmul.h"

#include "common/status.h"
#include "worker/model/cuda/status.h"

namespace ps::cuda {
namespace {

// What NVIDIA recommends for Hopper; older cards need less (https://docs.nvidia.com/cuda/cublas/#cublassetworkspace).
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

cublasComputeType_t ComputeType(Math math) {
  switch (math) {
    case Math::kFloat32:
      return CUBLAS_COMPUTE_32F;
    case Math::kTf32:
      return CUBLAS_COMPUTE_32F_FAST_TF32;
    case Math::kBfloat16:
      return CUBLAS_COMPUTE_32F_FAST_16BF;
  }
  return CUBLAS_COMPUTE_32F;
}

struct DescriptorFree {
  void operator()(cublasLtMatmulDesc_t descriptor) const { (void)cublasLtMatmulDescDestroy(descriptor); }
  void operator()(cublasLtMatrixLayout_t layout) const { (void)cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const { (void)cublasLtMatmulPreferenceDestroy(preference); }
};
template <typename Handle>
using OwnedDescriptor = std::unique_ptr<std::remove_pointer_t<Handle>, DescriptorFree>;

}  // namespace

// cuBLASLt's matrices are column-major, where ours read as their transposes. So it computes Cᵀ = op(B)ᵀ · op(A)ᵀ: its
// first operand is B, its second A, its result has n rows and m columns, and its bias is one value a row.
struct Matmul::Planned {
  OwnedDescriptor<cublasLtMatmulDesc_t> descriptor;
  OwnedDescriptor<cublasLtMatrixLayout_t> b;
  OwnedDescriptor<cublasLtMatrixLayout_t> a;
  OwnedDescriptor<cublasLtMatrixLayout_t> c;
  cublasLtMatmulAlgo_t algorithm{};
};

namespace {

// Column-major, without padding.
absl::Status MakeLayout(int64_t rows, int64_t columns, OwnedDescriptor<cublasLtMatrixLayout_t>& layout) {
  cublasLtMatrixLayout_t made = nullptr;
  PS_CUDA_RETURN_IF_ERROR(
      cublasLtMatrixLayoutCreate(&made, CUDA_R_32F, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows));
  layout.reset(made);
  return absl::OkStatus();
}

absl::Status MakeDescriptor(const MatmulShape& shape, Math math, OwnedDescriptor<cublasLtMatmulDesc_t>& descriptor) {
  cublasLtMatmulDesc_t made = nullptr;
  PS_CUDA_RETURN_IF_ERROR(cublasLtMatmulDescCreate(&made, ComputeType(math), CUDA_R_32F));
  descriptor.reset(made);
  const cublasOperation_t first = shape.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t second = shape.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  if (shape.bias) epilogue = shape.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof(value));
  };
  PS_CUDA_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, first));
  PS_CUDA_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSB, second));
  return PS_CUDA_STATUS(set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
}

absl::Status SetBias(cublasLtMatmulDesc_t descriptor, const float* bias) {
  if (bias == nullptr) return absl::OkStatus();
  return PS_CUDA_STATUS(
      cublasLtMatmulDescSetAttribute(descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)));
}

}  // namespace

Matmul::Matmul(Math math, cudaStream_t stream) : math_(math), stream_(stream) {}

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create(Math math, cudaStream_t stream) {
  std::unique_ptr<Matmul> matmul(new Matmul(math, stream));
  PS_CUDA_RETURN_IF_ERROR(cublasLtCreate(&matmul->handle_));
  PS_CUDA_RETURN_IF_ERROR(cudaMalloc(&matmul->workspace_, kWorkspaceBytes));
  return matmul;
}

Matmul::~Matmul() {
  plans_.clear();
  (void)cudaFree(workspace_);
  if (handle_ != nullptr) (void)cublasLtDestroy(handle_);
}

absl::Status Matmul::MakePlan(const MatmulShape& shape, const float* bias, Planned& plan) const {
  PS_RETURN_IF_ERROR(MakeDescriptor(shape, math_, plan.descriptor));
  PS_RETURN_IF_ERROR(SetBias(plan.descriptor.get(), bias));  // The choice of an algorithm looks at it.
  PS_RETURN_IF_ERROR(shape.transpose_b ? MakeLayout(shape.k, shape.n, plan.b) : MakeLayout(shape.n, shape.k, plan.b));
  PS_RETURN_IF_ERROR(shape.transpose_a ? MakeLayout(shape.m, shape.k, plan.a) : MakeLayout(shape.k, shape.m, plan.a));
  PS_RETURN_IF_ERROR(MakeLayout(shape.n, shape.m, plan.c));
  cublasLtMatmulPreference_t made = nullptr;
  PS_CUDA_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(&made));
  const OwnedDescriptor<cublasLtMatmulPreference_t> preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value));
  };
  // A product that is split along k is added in the workspace in a fixed order, or not split.
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  PS_CUDA_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes));
  PS_CUDA_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  PS_CUDA_RETURN_IF_ERROR(cublasLtMatmulAlgoGetHeuristic(handle_, plan.descriptor.get(), plan.b.get(), plan.a.get(),
                                                         plan.c.get(), plan.c.get(), made, 1, &found, &count));
  if (count == 0) {
    return absl::UnimplementedError(absl::StrCat("cuBLASLt has no algorithm for the product of [", shape.m, ", ",
                                                 shape.k, "] and [", shape.k, ", ", shape.n, "]"));
  }
  plan.algorithm = found.algo;
  return absl::OkStatus();
}

absl::StatusOr<Matmul::Planned*> Matmul::Find(const MatmulShape& shape, const float* bias) {
  const auto found = plans_.find(shape);
  if (found != plans_.end()) return found->second.get();
  auto plan = std::make_unique<Planned>();
  PS_RETURN_IF_ERROR(MakePlan(shape, bias, *plan));
  return plans_.emplace(shape, std::move(plan)).first->second.get();
}

absl::Status Matmul::Multiply(const MatmulShape& shape, const float* a, const float* b, const float* bias, float* c) {
  PS_ASSIGN_OR_RETURN(const auto found, Find(shape, bias));
  Planned& plan = *found;
  PS_RETURN_IF_ERROR(SetBias(plan.descriptor.get(), bias));
  const float one = 1.0F;
  const float zero = 0.0F;
  return PS_CUDA_STATUS(cublasLtMatmul(handle_, plan.descriptor.get(), &one, b, plan.b.get(), a, plan.a.get(), &zero, c,
                                       plan.c.get(), c, plan.c.get(), &plan.algorithm, workspace_, kWorkspaceBytes,
                                       stream_));
}

}  // namespace ps::cuda
