#include "worker/model/cuda/backend.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "worker/model/cuda/kernels.h"
#include "worker/model/cuda/matmul.h"
#include "worker/model/cuda/status.h"

namespace ps::cuda {
namespace {

struct HandleFree {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
  void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t graph) const { (void)cudaGraphExecDestroy(graph); }
};
template <typename Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, HandleFree>;

absl::Status MakeStream(Owned<cudaStream_t>& stream) {
  cudaStream_t made = nullptr;
  PS_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
  stream.reset(made);
  return absl::OkStatus();
}

absl::Status MakeEvent(unsigned int flags, Owned<cudaEvent_t>& event) {
  cudaEvent_t made = nullptr;
  PS_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&made, flags));
  event.reset(made);
  return absl::OkStatus();
}

// The first time the work is done as it comes: libraries may load kernels then, and memory is allocated, neither of
// which can be recorded.
class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaStream_t stream) : stream_(stream) {}

  absl::Status Run(const std::function<absl::Status()>& work) override {
    if (!done_) {
      PS_RETURN_IF_ERROR(work());
      done_ = true;
      return absl::OkStatus();
    }
    if (executable_ == nullptr) PS_RETURN_IF_ERROR(Record(work));
    return PS_CUDA_STATUS(cudaGraphLaunch(executable_.get(), stream_));
  }

 private:
  absl::Status Record(const std::function<absl::Status()>& work) {
    // Thread-local: other workers of the process may go on allocating.
    PS_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    const absl::Status worked = work();
    cudaGraph_t recorded = nullptr;
    const absl::Status ended = PS_CUDA_STATUS(cudaStreamEndCapture(stream_, &recorded));
    const Owned<cudaGraph_t> graph(recorded);
    PS_RETURN_IF_ERROR(worked);
    PS_RETURN_IF_ERROR(ended);
    cudaGraphExec_t made = nullptr;
    PS_CUDA_RETURN_IF_ERROR(cudaGraphInstantiateWithFlags(&made, graph.get(), 0));
    executable_.reset(made);
    return absl::OkStatus();
  }

  const cudaStream_t stream_;
  bool done_ = false;
  Owned<cudaGraphExec_t> executable_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int card, Math math) : card_(card), math_(math) {}

  absl::Status Init() {
    PS_CUDA_RETURN_IF_ERROR(cudaSetDevice(card_));
    cudaDeviceProp properties{};
    PS_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, card_));
    const char* const math = math_ == Math::kFloat32 ? "float32" : math_ == Math::kTf32 ? "tf32" : "bfloat16";
    name_ = absl::StrCat("cuda:", card_, " (", properties.name, ", ", math, ")");
    for (Owned<cudaStream_t>* stream : {&compute_, &upload_, &download_}) PS_RETURN_IF_ERROR(MakeStream(*stream));
    for (Owned<cudaEvent_t>* event : {&computed_, &uploaded_}) {
      PS_RETURN_IF_ERROR(MakeEvent(cudaEventDisableTiming, *event));
    }
    PS_ASSIGN_OR_RETURN(matmul_, Matmul::Create(math_, compute_.get()));
    return absl::OkStatus();
  }

  // What is queued reads memory that is about to be freed.
  ~CudaBackend() override { (void)Synchronize(); }

  std::string name() const override { return name_; }
  bool unified() const override { return false; }

  absl::StatusOr<Memory> AllocateDevice(int64_t bytes) override {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    void* made = nullptr;
    if (absl::Status status = PS_CUDA_STATUS(cudaMalloc(&made, size)); !status.ok()) {
      size_t free = 0;
      size_t total = 0;
      (void)cudaMemGetInfo(&free, &total);
      return Annotate(status, absl::StrFormat("%s has %.1f MB free of %.1f MB; %.1f MB were requested", name_,
                                              static_cast<double>(free) / 1e6, static_cast<double>(total) / 1e6,
                                              static_cast<double>(size) / 1e6));
    }
    Memory memory(static_cast<std::byte*>(made), [](std::byte* data) { (void)cudaFree(data); });
    PS_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(made, 0, size, compute_.get()));
    PS_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(compute_.get()));
    return memory;
  }

  absl::StatusOr<int64_t> FreeDeviceBytes() override {
    size_t free = 0;
    size_t total = 0;
    PS_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }

  absl::StatusOr<Memory> AllocateHost(int64_t bytes) override {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    void* made = nullptr;
    PS_CUDA_RETURN_IF_ERROR(cudaHostAlloc(&made, size, cudaHostAllocPortable));
    std::fill_n(static_cast<std::byte*>(made), size, std::byte{0});
    return Memory(static_cast<std::byte*>(made), [](std::byte* data) { (void)cudaFreeHost(data); });
  }

  absl::StatusOr<Memory> PinHost(const Memory& memory, int64_t bytes) override {
    PS_CUDA_RETURN_IF_ERROR(cudaHostRegister(memory.get(), static_cast<size_t>(bytes), cudaHostRegisterPortable));
    return Memory(memory.get(), [memory](std::byte* data) { (void)cudaHostUnregister(data); });
  }

  absl::StatusOr<std::shared_ptr<const std::byte>> PinHostPages(const std::shared_ptr<const std::byte>& pages,
                                                                int64_t bytes) override {
    int can = 0;
    PS_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&can, cudaDevAttrHostRegisterReadOnlySupported, card_));
    if (can == 0) return absl::UnimplementedError(absl::StrCat(name_, " cannot pin memory that is mapped for reading"));
    void* const begin = const_cast<std::byte*>(pages.get());
    PS_CUDA_RETURN_IF_ERROR(
        cudaHostRegister(begin, static_cast<size_t>(bytes), cudaHostRegisterPortable | cudaHostRegisterReadOnly));
    return std::shared_ptr<const std::byte>(pages.get(),
                                            [pages, begin](const std::byte*) { (void)cudaHostUnregister(begin); });
  }

  absl::Status CopyToDevice(const void* host, void* device, int64_t bytes) override {
    PS_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, upload_.get()));
    PS_CUDA_RETURN_IF_ERROR(cudaEventRecord(uploaded_.get(), upload_.get()));
    return PS_CUDA_STATUS(cudaStreamWaitEvent(compute_.get(), uploaded_.get()));
  }

  absl::Status CopyToHost(const void* device, void* host, int64_t bytes) override {
    PS_RETURN_IF_ERROR(DownloadAfterComputation());
    return PS_CUDA_STATUS(
        cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, download_.get()));
  }

  absl::Status Synchronize() override {
    for (const Owned<cudaStream_t>* stream : {&upload_, &compute_, &download_}) {
      if (*stream != nullptr) PS_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream->get()));
    }
    return absl::OkStatus();
  }

  absl::Status RecordEvent(int event) override {
    const auto index = static_cast<size_t>(event);
    if (events_.size() <= index) events_.resize(index + 1);
    if (events_[index] == nullptr) PS_RETURN_IF_ERROR(MakeEvent(cudaEventDefault, events_[index]));
    PS_RETURN_IF_ERROR(DownloadAfterComputation());
    return PS_CUDA_STATUS(cudaEventRecord(events_[index].get(), download_.get()));
  }
  absl::Status WaitEvent(int event) override {
    return PS_CUDA_STATUS(cudaEventSynchronize(events_[static_cast<size_t>(event)].get()));
  }
  absl::StatusOr<double> SecondsBetween(int from, int to) override {
    float milliseconds = 0;
    PS_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&milliseconds, events_[static_cast<size_t>(from)].get(),
                                                 events_[static_cast<size_t>(to)].get()));
    return static_cast<double>(milliseconds) / 1e3;
  }

  std::unique_ptr<Graph> MakeGraph() override { return std::make_unique<CudaGraph>(compute_.get()); }

  absl::Status DenseForward(const float* x, const float* weight, const float* bias, float* y, int64_t batch, int64_t in,
                            int64_t out, Activation activation) override {
    const bool relu = activation == Activation::kRelu;
    PS_RETURN_IF_ERROR(matmul_->Multiply(
        {.m = batch, .n = out, .k = in, .transpose_a = false, .transpose_b = true, .bias = true, .relu = relu}, x,
        weight, bias, y));
    if (relu) return absl::OkStatus();
    return PS_CUDA_STATUS(ApplyActivation(activation, y, batch * out, compute_.get()));
  }

  absl::Status DenseBackwardInput(const float* dy, const float* weight, const float* y, float* dx, int64_t batch,
                                  int64_t in, int64_t out, Activation activation) override {
    PS_RETURN_IF_ERROR(matmul_->Multiply(
        {.m = batch, .n = in, .k = out, .transpose_a = false, .transpose_b = false, .bias = false, .relu = false}, dy,
        weight, nullptr, dx));
    return PS_CUDA_STATUS(ApplyDerivative(activation, y, dx, batch * in, compute_.get()));
  }

  absl::Status DenseBackwardWeights(const float* dy, const float* x, float* d_weight, float* d_bias, int64_t batch,
                                    int64_t in, int64_t out) override {
    PS_CUDA_RETURN_IF_ERROR(ColumnSums(dy, d_bias, batch, out, compute_.get()));
    return matmul_->Multiply(
        {.m = out, .n = in, .k = batch, .transpose_a = true, .transpose_b = false, .bias = false, .relu = false}, dy, x,
        nullptr, d_weight);
  }

  absl::Status LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                               int64_t classes, LossSums* sums) override {
    PS_RETURN_IF_ERROR(GrowScratch(batch));
    return PS_CUDA_STATUS(cuda::LossAndGradient(loss, outputs, labels, d_outputs, batch, classes,
                                                reinterpret_cast<SampleLoss*>(scratch_.back().get()), sums,
                                                compute_.get()));
  }

  absl::Status SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                            LossSums* sums) override {
    PS_RETURN_IF_ERROR(GrowScratch(batch));
    return PS_CUDA_STATUS(cuda::SquaredError(outputs, targets, d_outputs, batch,
                                             reinterpret_cast<SampleLoss*>(scratch_.back().get()), sums,
                                             compute_.get()));
  }

  absl::Status Round(const float* values, int64_t count, WireType type, void* rounded) override {
    return PS_CUDA_STATUS(cuda::Round(values, count, type, rounded, compute_.get()));
  }

  absl::Status FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found) override {
    return PS_CUDA_STATUS(cuda::FindNotFinite(values, count, type, found, compute_.get()));
  }

  absl::Status Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    return PS_CUDA_STATUS(cuda::Gather(samples, indices, count, features, x, compute_.get()));
  }
  absl::Status Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    return PS_CUDA_STATUS(cuda::Gather(samples, indices, count, features, x, compute_.get()));
  }
  absl::Status Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered) override {
    return PS_CUDA_STATUS(cuda::Gather(labels, indices, count, gathered, compute_.get()));
  }

 private:
  absl::Status DownloadAfterComputation() {
    PS_CUDA_RETURN_IF_ERROR(cudaEventRecord(computed_.get(), compute_.get()));
    return PS_CUDA_STATUS(cudaStreamWaitEvent(download_.get(), computed_.get()));
  }

  // Recorded work goes on using the memory that it was recorded with.
  absl::Status GrowScratch(int64_t samples) {
    if (!scratch_.empty() && samples <= scratch_samples_) return absl::OkStatus();
    const int64_t more = std::max(samples, 2 * scratch_samples_);
    PS_ASSIGN_OR_RETURN(Memory memory, AllocateDevice(more * static_cast<int64_t>(sizeof(SampleLoss))));
    scratch_.push_back(std::move(memory));
    scratch_samples_ = more;
    return absl::OkStatus();
  }

  const int card_;
  const Math math_;
  std::string name_;
  Owned<cudaStream_t> compute_;
  Owned<cudaStream_t> upload_;
  Owned<cudaStream_t> download_;
  Owned<cudaEvent_t> computed_;
  Owned<cudaEvent_t> uploaded_;
  std::vector<Owned<cudaEvent_t>> events_;
  std::unique_ptr<Matmul> matmul_;
  std::vector<Memory> scratch_;
  int64_t scratch_samples_ = 0;
};

// PS_CUDA_OLDEST is the oldest architecture that the build has code for; newer ones run that or theirs.
absl::StatusOr<int> CheckCapabilities(int cards) {
  for (int card = 0; card < cards; ++card) {
    int major = 0;
    int minor = 0;
    PS_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card));
    PS_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, card));
    if (10 * major + minor < PS_CUDA_OLDEST) {
      return Unavailable("cuda:", card, " has compute capability ", major, ".", minor, ", this build needs ",
                         PS_CUDA_OLDEST / 10, ".", PS_CUDA_OLDEST % 10);
    }
  }
  return cards;
}

std::string Version(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

}  // namespace

absl::StatusOr<int> CountCards() {
  int cards = 0;
  const cudaError_t error = cudaGetDeviceCount(&cards);
  if (error == cudaSuccess && cards > 0) return CheckCapabilities(cards);
  (void)cudaGetLastError();
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return absl::UnavailableError("there is no NVIDIA driver on this machine");
  }
  if (error == cudaErrorInsufficientDriver) {
    return Unavailable("the NVIDIA driver is too old: it has CUDA ", Version(driver), ", this build needs ",
                       Version(CUDART_VERSION));
  }
  return Unavailable("no GPU can be used: ", cudaGetErrorString(error));
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(int card, Math math) {
  auto backend = std::make_unique<CudaBackend>(card, math);
  PS_RETURN_IF_ERROR(backend->Init());
  return backend;
}

}  // namespace ps::cuda
