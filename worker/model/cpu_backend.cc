#include "worker/model/device.h"

#include <omp.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/half_floats.h"
#include "common/simd.h"
#include "common/status.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

using dnnl::memory;

struct ReluBackwardKernel {
  PS_KERNEL void Run(size_t n, const float* y, float* dx) {
    for (size_t i = 0; i < n; ++i) dx[i] = y[i] > 0.0F ? dx[i] : 0.0F;
  }
};
struct SigmoidBackwardKernel {
  PS_KERNEL void Run(size_t n, const float* y, float* dx) {
    for (size_t i = 0; i < n; ++i) dx[i] = dx[i] * (y[i] * (1.0F - y[i]));
  }
};
struct TanhBackwardKernel {
  PS_KERNEL void Run(size_t n, const float* y, float* dx) {
    for (size_t i = 0; i < n; ++i) dx[i] = dx[i] * (1.0F - y[i] * y[i]);
  }
};
struct AddRowKernel {
  PS_KERNEL void Run(size_t n, const float* row, float* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] += row[i];
  }
};

// C [m, n] = op(A) · op(B), where a transposed operand is stored the other way round.
struct MatmulKey {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false, bias = false;
  Activation activation = Activation::kNone;
  auto operator<=>(const MatmulKey&) const =
      default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 means the 0 inside.
};

struct Matmul {
  dnnl::matmul primitive;
  memory a, b, bias, c;  // Their data handles are set at each use.
};

// Each writes the gradient of one sample's loss times `scale` to dz (unless it is null), and returns the loss.

// The largest output is taken off first, so that no exponential overflows.
double SoftmaxCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  const float largest = *std::max_element(z, z + classes);
  float sum = 0;
  for (int64_t k = 0; k < classes; ++k) sum += std::exp(z[k] - largest);
  if (dz != nullptr) {
    for (int64_t k = 0; k < classes; ++k) dz[k] = scale * (std::exp(z[k] - largest) / sum - (k == label ? 1.0F : 0.0F));
  }
  return std::log(static_cast<double>(sum)) - (static_cast<double>(z[label]) - static_cast<double>(largest));
}

// −y·log σ(z) − (1−y)·log(1−σ(z)) = max(z, 0) − z·y + log(1 + e^−|z|)
double SigmoidCrossEntropy(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const float y = k == label ? 1.0F : 0.0F;
    const float e = std::exp(-std::abs(z[k]));
    loss += static_cast<double>(std::max(z[k], 0.0F)) - static_cast<double>(z[k]) * static_cast<double>(y) +
            static_cast<double>(std::log1p(e));
    if (dz != nullptr) dz[k] = scale * ((z[k] >= 0 ? 1.0F / (1.0F + e) : e / (1.0F + e)) - y);
  }
  return loss;
}

double MeanSquaredError(const float* z, int32_t label, float* dz, int64_t classes, float scale) {
  double loss = 0;
  for (int64_t k = 0; k < classes; ++k) {
    const float error = z[k] - (k == label ? 1.0F : 0.0F);
    loss += static_cast<double>(error) * static_cast<double>(error);
    if (dz != nullptr) dz[k] = scale * 2.0F * error / static_cast<float>(classes);
  }
  return loss / static_cast<double>(classes);
}

// Whether the label's output is the largest, and the first of equal ones. What is not a number compares with nothing.
bool IsCorrect(const float* z, int32_t label, int64_t classes) {
  for (int64_t k = 0; k < classes; ++k) {
    if (!(k < label ? z[k] < z[label] : z[k] <= z[label])) return false;
  }
  return true;
}

class CpuGraph final : public Graph {
 public:
  absl::Status Run(const std::function<absl::Status()>& work) override { return work(); }
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads)
      : threads_(threads), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_), isa_(BestIsa()) {
    omp_set_num_threads(threads);
  }

  std::string name() const override { return absl::StrCat("cpu (oneDNN, threads=", threads_, ")"); }
  bool unified() const override { return true; }

  absl::StatusOr<Memory> AllocateDevice(int64_t bytes) override {
    const size_t size = (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, size);
    if (memory == nullptr) return ResourceExhausted("no memory for ", size, " bytes");
    std::memset(memory, 0, size);
    return Memory(static_cast<std::byte*>(memory), [](std::byte* data) { std::free(data); });
  }
  absl::StatusOr<int64_t> FreeDeviceBytes() override { return INT64_MAX; }
  absl::StatusOr<Memory> AllocateHost(int64_t bytes) override { return AllocateDevice(bytes); }
  absl::StatusOr<Memory> PinHost(const Memory& memory, int64_t /*bytes*/) override { return memory; }
  absl::StatusOr<std::shared_ptr<const std::byte>> PinHostPages(const std::shared_ptr<const std::byte>& pages,
                                                                int64_t /*bytes*/) override {
    return pages;
  }

  absl::Status CopyToDevice(const void* host, void* device, int64_t bytes) override {
    if (host != device) std::memcpy(device, host, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  absl::Status CopyToHost(const void* device, void* host, int64_t bytes) override {
    return CopyToDevice(device, host, bytes);
  }
  absl::Status Synchronize() override { return absl::OkStatus(); }

  absl::Status RecordEvent(int event) override {
    const auto index = static_cast<size_t>(event);
    if (events_.size() <= index) events_.resize(index + 1);
    events_[index] = Now();
    return absl::OkStatus();
  }
  absl::Status WaitEvent(int) override { return absl::OkStatus(); }
  absl::StatusOr<double> SecondsBetween(int from, int to) override {
    return Seconds(events_[static_cast<size_t>(to)] - events_[static_cast<size_t>(from)]);
  }
  std::unique_ptr<Graph> MakeGraph() override { return std::make_unique<CpuGraph>(); }

  absl::Status DenseForward(const float* x, const float* weight, const float* bias, float* y, int64_t batch, int64_t in,
                            int64_t out, Activation activation) override {
    return Multiply({.m = batch, .n = out, .k = in, .transpose_b = true, .bias = true, .activation = activation}, x,
                    weight, bias, y);
  }

  absl::Status DenseBackwardInput(const float* dy, const float* weight, const float* y, float* dx, int64_t batch,
                                  int64_t in, int64_t out, Activation activation) override {
    PS_RETURN_IF_ERROR(Multiply({.m = batch, .n = in, .k = out}, dy, weight, nullptr, dx));
    const auto n = static_cast<size_t>(batch * in);
    switch (activation) {
      case Activation::kRelu:
        RunKernel<ReluBackwardKernel>(isa_, n, y, dx);
        break;
      case Activation::kSigmoid:
        RunKernel<SigmoidBackwardKernel>(isa_, n, y, dx);
        break;
      case Activation::kTanh:
        RunKernel<TanhBackwardKernel>(isa_, n, y, dx);
        break;
      case Activation::kNone:
        break;
    }
    return absl::OkStatus();
  }

  absl::Status DenseBackwardWeights(const float* dy, const float* x, float* d_weight, float* d_bias, int64_t batch,
                                    int64_t in, int64_t out) override {
    std::fill_n(d_bias, out, 0.0F);
    for (int64_t row = 0; row < batch; ++row) {
      RunKernel<AddRowKernel>(isa_, static_cast<size_t>(out), dy + row * out, d_bias);
    }
    return Multiply({.m = out, .n = in, .k = batch, .transpose_a = true}, dy, x, nullptr, d_weight);
  }

  absl::Status LossAndGradient(Loss loss, const float* outputs, const int32_t* labels, float* d_outputs, int64_t batch,
                               int64_t classes, LossSums* sums) override {
    *sums = {};
    const float scale = 1.0F / static_cast<float>(batch);
    for (int64_t sample = 0; sample < batch; ++sample) {
      const float* z = outputs + sample * classes;
      float* dz = d_outputs == nullptr ? nullptr : d_outputs + sample * classes;
      const int32_t label = labels[sample];
      switch (loss) {
        case Loss::kSoftmaxCrossEntropy:
          sums->loss += SoftmaxCrossEntropy(z, label, dz, classes, scale);
          break;
        case Loss::kSigmoidCrossEntropy:
          sums->loss += SigmoidCrossEntropy(z, label, dz, classes, scale);
          break;
        case Loss::kMse:
          sums->loss += MeanSquaredError(z, label, dz, classes, scale);
          break;
      }
      sums->correct += IsCorrect(z, label, classes) ? 1 : 0;
    }
    return absl::OkStatus();
  }
  absl::Status SquaredError(const float* outputs, const float* targets, float* d_outputs, int64_t batch,
                            LossSums* sums) override {
    *sums = {};
    const float scale = 1.0F / static_cast<float>(batch);
    for (int64_t sample = 0; sample < batch; ++sample) {
      const float error = outputs[sample] - targets[sample];
      sums->loss += static_cast<double>(error) * static_cast<double>(error);
      if (d_outputs != nullptr) d_outputs[sample] = scale * 2.0F * error;
    }
    return absl::OkStatus();
  }

  absl::Status Round(const float* values, int64_t count, WireType type, void* rounded) override {
    auto* const halves = static_cast<uint16_t*>(rounded);
    if (RoundHalf(values, static_cast<size_t>(count), type, static_cast<uint8_t*>(rounded), isa_)) {
      return absl::OkStatus();
    }
    for (int64_t i = 0; i < count; ++i) {
      // Rounding leaves a zero of a NaN whose bits are all ones.
      if (std::isnan(values[i])) halves[i] = type == WireType::kBfloat16 ? 0x7FC0 : 0x7E00;
    }
    return absl::OkStatus();
  }
  absl::Status FindNotFinite(const void* values, int64_t count, WireType type, int32_t* found) override {
    const auto elements = static_cast<size_t>(count);
    const bool finite = type == WireType::kFloat32
                            ? AllFinite(values, elements, isa_)
                            : AllFiniteHalf(static_cast<const uint8_t*>(values), elements, type, isa_);
    *found = finite ? 0 : 1;
    return absl::OkStatus();
  }

  absl::Status Gather(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    GatherRows(samples, indices, count, features, x);
    return absl::OkStatus();
  }
  absl::Status Gather(const float* samples, const int32_t* indices, int64_t count, int64_t features,
                      float* x) override {
    GatherRows(samples, indices, count, features, x);
    return absl::OkStatus();
  }
  absl::Status Gather(const int32_t* labels, const int32_t* indices, int64_t count, int32_t* gathered) override {
    for (int64_t k = 0; k < count; ++k) gathered[k] = labels[indices[k]];
    return absl::OkStatus();
  }

 private:
  // oneDNN throws; nothing of ours does.
  absl::Status Multiply(const MatmulKey& key, const float* a, const float* b, const float* bias, float* c) {
    try {
      auto found = matmuls_.find(key);
      if (found == matmuls_.end()) found = matmuls_.emplace(key, MakeMatmul(key)).first;
      Matmul& matmul = found->second;
      matmul.a.set_data_handle(const_cast<float*>(a));
      matmul.b.set_data_handle(const_cast<float*>(b));
      matmul.c.set_data_handle(c);
      std::unordered_map<int, memory> arguments = {
          {DNNL_ARG_SRC, matmul.a}, {DNNL_ARG_WEIGHTS, matmul.b}, {DNNL_ARG_DST, matmul.c}};
      if (key.bias) {
        matmul.bias.set_data_handle(const_cast<float*>(bias));
        arguments[DNNL_ARG_BIAS] = matmul.bias;
      }
      matmul.primitive.execute(stream_, arguments);
      stream_.wait();
      return absl::OkStatus();
    } catch (const dnnl::error& error) {
      return Internal("oneDNN, product of [", key.m, ", ", key.k, "] and [", key.k, ", ", key.n, "]: ", error.what());
    }
  }

  static void AppendActivation(dnnl::post_ops& ops, dnnl::algorithm algorithm) {
#if DNNL_VERSION_MAJOR >= 3
    ops.append_eltwise(algorithm, 0.0F, 0.0F);
#else
    ops.append_eltwise(1.0F, algorithm, 0.0F, 0.0F);
#endif
  }

  Matmul MakeMatmul(const MatmulKey& key) const {
    using tag = memory::format_tag;
    const auto type = memory::data_type::f32;
    const memory::desc a({key.m, key.k}, type, key.transpose_a ? tag::ba : tag::ab);
    const memory::desc b({key.k, key.n}, type, key.transpose_b ? tag::ba : tag::ab);
    const memory::desc c({key.m, key.n}, type, tag::ab);
    const memory::desc bias = key.bias ? memory::desc({1, key.n}, type, tag::ab) : memory::desc();
    dnnl::post_ops ops;
    if (key.activation == Activation::kRelu) AppendActivation(ops, dnnl::algorithm::eltwise_relu);
    if (key.activation == Activation::kSigmoid) AppendActivation(ops, dnnl::algorithm::eltwise_logistic);
    if (key.activation == Activation::kTanh) AppendActivation(ops, dnnl::algorithm::eltwise_tanh);
    dnnl::primitive_attr attributes;
    attributes.set_post_ops(ops);
#if DNNL_VERSION_MAJOR >= 3
    const auto description = key.bias ? dnnl::matmul::primitive_desc(engine_, a, b, bias, c, attributes)
                                      : dnnl::matmul::primitive_desc(engine_, a, b, c, attributes);
#else
    const auto operation = key.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
    const dnnl::matmul::primitive_desc description(operation, attributes, engine_);
#endif
    return {.primitive = dnnl::matmul(description),
            .a = memory(a, engine_, nullptr),
            .b = memory(b, engine_, nullptr),
            .bias = key.bias ? memory(bias, engine_, nullptr) : memory(),
            .c = memory(c, engine_, nullptr)};
  }

  const int threads_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  const Isa isa_;
  std::vector<TimePoint> events_;
  std::map<MatmulKey, Matmul> matmuls_;  // There are at most layers × 3 × (batch sizes in use).
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(int threads) {
  if (threads < 1 || threads > 1024) return InvalidArgument("--threads=", threads, ": expected 1 to 1024");
  try {
    return std::make_unique<CpuBackend>(threads);
  } catch (const dnnl::error& error) {
    return Internal("oneDNN: ", error.what());
  }
}

}  // namespace ps
