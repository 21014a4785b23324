#include "server/engine/reduce.h"

#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/clipping.h"
#include "common/half_floats.h"
#include "common/simd.h"
#if defined(__SSE2__)
#endif

namespace ps {
namespace {

// 16 KiB: the block's sum stays in the first-level cache between the reduction and the optimizer.
constexpr size_t kBlockElements = 4096;

// How a received element is read. They lie at any address, so they are read with memcpy, which compiles to unaligned
// vector loads.
struct FloatElement {
  PS_KERNEL float Read(const uint8_t* from, size_t i) {
    float value;
    std::memcpy(&value, from + i * sizeof(value), sizeof(value));
    return value;
  }
};

template <typename Half>
struct HalfElement {
  PS_KERNEL float Read(const uint8_t* from, size_t i) {
    uint16_t value;
    std::memcpy(&value, from + i * sizeof(value), sizeof(value));
    return Half::Widen(value);
  }
};

template <typename Element>
struct ScaleKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* gradient, float coefficient, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) sum[i] = coefficient * Element::Read(gradient, i);
  }
};

// Gives the bits that scaling one after the other gives.
template <typename Element>
struct ScaleTwoKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* a, const uint8_t* b, float of_a, float of_b, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) sum[i] = of_a * Element::Read(a, i) + of_b * Element::Read(b, i);
  }
};

template <typename Element>
struct AddScaledKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* gradient, float coefficient, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) sum[i] = sum[i] + coefficient * Element::Read(gradient, i);
  }
};

// Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017, equation 10.
struct CompensateKernel {
  PS_KERNEL void Run(size_t elements, const float* weights, const float* pulled, float lambda, float* gradient) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      const float g = gradient[i];
      gradient[i] = g + lambda * (g * g) * (weights[i] - pulled[i]);
    }
  }
};

// Both 64-byte aligned. Memory that is written whole need not be read first.
void WritePastCaches(const float* from, size_t elements, float* to) {
  size_t i = 0;
#if defined(__SSE2__)
  for (; i + 4 <= elements; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
#endif
  std::copy(from + i, from + elements, to + i);
}

// Before other threads are told of them.
void EndWritesPastCaches() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <typename Element>
void ReduceAs(std::span<const GradientTerm> terms, size_t begin, size_t elements, Isa isa, float* sum) {
  alignas(64) uint8_t scratch[2][kBlockElements * sizeof(float)];
  const size_t bytes = WireBytes(terms.front().gradient->type());
  const auto read = [&](size_t term, size_t i) {
    return terms[term].gradient->Contiguous(begin * bytes, elements * bytes, scratch[i]);
  };
  const uint8_t* const first = read(0, 0);
  if (terms.size() == 1) return RunKernel<ScaleKernel<Element>>(isa, elements, first, terms[0].coefficient, sum);
  RunKernel<ScaleTwoKernel<Element>>(isa, elements, first, read(1, 1), terms[0].coefficient, terms[1].coefficient, sum);
  for (size_t term = 2; term < terms.size(); ++term) {
    RunKernel<AddScaledKernel<Element>>(isa, elements, read(term, 0), terms[term].coefficient, sum);
  }
}

// The same, where only some elements of each gradient came.
void ReduceSparse(std::span<const GradientTerm> terms, size_t begin, size_t elements, float* sum) {
  std::fill_n(sum, elements, 0.0F);
  for (const GradientTerm& term : terms) {
    const SparseValues& sparse = *term.gradient->sparse();
    const auto first = std::lower_bound(sparse.positions.begin(), sparse.positions.end(), begin);
    for (auto at = first; at != sparse.positions.end() && *at < begin + elements; ++at) {
      sum[*at - begin] += term.coefficient * sparse.values[static_cast<size_t>(at - sparse.positions.begin())];
    }
  }
}

// The sum of this block's gradients, which are read where they were received.
void Reduce(std::span<const GradientTerm> terms, size_t begin, size_t elements, Isa isa, float* sum) {
  if (terms.front().gradient->sparse() != nullptr) return ReduceSparse(terms, begin, elements, sum);
  const WireType type = terms.front().gradient->type();  // A kE3m0 was unpacked when it arrived.
  if (type == WireType::kFloat32) return ReduceAs<FloatElement>(terms, begin, elements, isa, sum);
  if (type == WireType::kBfloat16) return ReduceAs<HalfElement<Bfloat16>>(terms, begin, elements, isa, sum);
  if (type == WireType::kFloat16) return ReduceAs<HalfElement<Float16>>(terms, begin, elements, isa, sum);
}

// The slice's block from `begin` on, but for its gradient. What is not there stays null.
OptimizerBlock BlockOf(const OptimizerBlock& slice, size_t begin, const Optimizer& optimizer) {
  const auto at = [&](auto* floats) { return floats == nullptr ? nullptr : floats + begin; };
  OptimizerBlock block = {.elements = std::min(kBlockElements, slice.elements - begin),
                          .weights = at(slice.weights),
                          .new_weights = at(slice.new_weights)};
  for (int k = 0; k < optimizer.state_tensors(); ++k) {
    block.state[k] = at(slice.state[k]);
    block.new_state[k] = at(slice.new_state[k]);
  }
  return block;
}

bool IsChangeable(const VersionInput& version) {
  return std::any_of(version.terms.begin(), version.terms.end(),
                     [](const GradientTerm& term) { return term.gradient->changeable(); });
}

// What this block of the version is made with, but for clip_factor. False: what was read of changeable memory was not
// all finite. A value that is not makes a sum that is not.
bool Gradient(const VersionInput& version, size_t begin, size_t elements, const float* weights, Isa isa, float* sum) {
  Reduce(version.terms, begin, elements, isa, sum);
  const bool finite = !IsChangeable(version) || AllFinite(sum, elements, isa);  // They are in the first-level cache.
  if (version.delay_compensation != 0) {
    RunKernel<CompensateKernel>(isa, elements, weights, version.pulled + begin, version.delay_compensation, sum);
  }
  if (version.clip_value.has_value()) ClipValues(sum, elements, *version.clip_value, isa);
  return finite;
}

bool ClippedGradient(const VersionInput& version, size_t begin, const OptimizerBlock& block, Isa isa, float* sum) {
  const bool finite = Gradient(version, begin, block.elements, block.weights, isa, sum);
  if (version.clip_factor != 1) Scale(sum, block.elements, version.clip_factor, isa);
  return finite;
}

// Whether the gradient is one push's, and taken as it is.
bool TakenAsItIs(const VersionInput& version) {
  return version.terms.size() == 1 && version.terms.front().gradient->type() == WireType::kFloat32 &&
         version.terms.front().gradient->sparse() == nullptr && !version.terms.front().gradient->changeable() &&
         version.terms.front().coefficient == 1 && version.delay_compensation == 0 && !version.clip_value.has_value() &&
         version.clip_factor == 1;
}

// The block's gradient: where it was received, if it can be read there, else in `sum`. If what was read is not finite,
// `applied` says so.
const float* GradientOf(const VersionInput& version, size_t begin, const OptimizerBlock& block, Isa isa, float* sum,
                        Applied* applied) {
  if (TakenAsItIs(version)) {
    const uint8_t* const received = version.terms.front().gradient->Contiguous(
        begin * sizeof(float), block.elements * sizeof(float), reinterpret_cast<uint8_t*>(sum));
    if (reinterpret_cast<uintptr_t>(received) % alignof(float) == 0) return reinterpret_cast<const float*>(received);
  }
  if (!ClippedGradient(version, begin, block, isa, sum)) {
    applied->finite = false;
    applied->not_finite_of |= uint32_t{1} << version.version;
  }
  return sum;
}

// w ← w + share·(g − w); with a share of 1, w ← g.
struct MoveTowardsKernel {
  PS_KERNEL void Run(size_t elements, const float* pushed, const float* values, float* new_values, float share) {
    if (share == 1) {
      std::copy_n(pushed, elements, new_values);
      return;
    }
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_values[i] = values[i] + share * (pushed[i] - values[i]);
  }
};

// w ← w + share·g
struct AddShareKernel {
  PS_KERNEL void Run(size_t elements, const float* pushed, const float* values, float* new_values, float share) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) new_values[i] = values[i] + share * pushed[i];
  }
};

template <typename Kernel>
class ShareStep final : public Optimizer {
 public:
  explicit ShareStep(float share) : share_(share) {}
  int state_tensors() const override { return 0; }
  void Apply(const OptimizerBlock& block, const UpdateContext& /*context*/, Isa isa) const override {
    RunKernel<Kernel>(isa, block.elements, block.gradient, block.weights, block.new_weights, share_);
  }

 private:
  const float share_;
};

}  // namespace

Applied ReduceAndApply(std::span<const VersionInput> versions, const OptimizerBlock& slice, const Optimizer& optimizer,
                       Isa isa, bool past_caches, const RoundedWeights& rounded) {
  const FlushSubnormals flush;
  alignas(64) float sum[kBlockElements];
  alignas(64) float made[1 + kMaxStateTensors][kBlockElements];  // In the cache, before it is written past it.
  Applied applied;
  for (size_t begin = 0; begin < slice.elements; begin += kBlockElements) {
    OptimizerBlock block = BlockOf(slice, begin, optimizer);
    const OptimizerBlock to = block;
    if (past_caches) {
      block.new_weights = made[0];
      for (int k = 0; k < optimizer.state_tensors(); ++k) block.new_state[k] = made[k + 1];
    }
    for (const VersionInput& version : versions) {
      block.gradient = GradientOf(version, begin, block, isa, &sum[0], &applied);
      optimizer.Apply(block, version.context, isa);
      block.weights = block.new_weights;  // The next version is made of this one.
      std::copy(std::begin(block.new_state), std::end(block.new_state), std::begin(block.state));
    }
    // While they are in the cache.
    const bool finite = rounded.to == nullptr ? AllFinite(block.new_weights, block.elements, isa)
                                              : RoundHalf(block.new_weights, block.elements, rounded.type,
                                                          rounded.to + begin * WireBytes(rounded.type), isa);
    applied.finite = applied.finite && finite;
    if (!past_caches) continue;
    WritePastCaches(made[0], block.elements, to.new_weights);
    for (int k = 0; k < optimizer.state_tensors(); ++k) WritePastCaches(made[k + 1], block.elements, to.new_state[k]);
  }
  if (past_caches) EndWritesPastCaches();
  return applied;
}

TrustSquares UpdateSquares(const VersionInput& version, const OptimizerBlock& slice, const Optimizer& optimizer,
                           Isa isa) {
  const FlushSubnormals flush;
  alignas(64) float sum[kBlockElements];
  TrustSquares total;
  Applied applied;  // Whether it is finite is decided when it is applied.
  for (size_t begin = 0; begin < slice.elements; begin += kBlockElements) {
    OptimizerBlock block = BlockOf(slice, begin, optimizer);
    block.gradient = GradientOf(version, begin, block, isa, &sum[0], &applied);
    const TrustSquares squares = optimizer.Measure(block, version.context, isa);
    total.weights += squares.weights;
    total.update += squares.update;
  }
  return total;
}

double GradientSquares(const VersionInput& version, const OptimizerBlock& slice, Isa isa) {
  static_assert(kBlockElements % SquareSum::kLanes == 0);
  const FlushSubnormals flush;
  alignas(64) float sum[kBlockElements];
  SquareSum squares;
  for (size_t begin = 0; begin < slice.elements; begin += kBlockElements) {
    const size_t elements = std::min(kBlockElements, slice.elements - begin);
    const float* const weights = slice.weights == nullptr ? nullptr : slice.weights + begin;
    (void)Gradient(version, begin, elements, weights, isa, &sum[0]);
    squares.Add(&sum[0], elements, isa);
  }
  return squares.total();
}

float Coefficient(uint64_t samples, uint64_t total) {
  return static_cast<float>(static_cast<double>(samples) / static_cast<double>(total));
}

bool AllFinite(const Payload& payload, Isa isa) {
  if (const SparseValues* const sparse = payload.sparse().get(); sparse != nullptr) {
    return AllFinite(sparse->values.data(), sparse->values.size(), isa);
  }
  const size_t width = WireBytes(payload.type());
  const auto finite = [&](const uint8_t* values, size_t elements) {
    return payload.type() == WireType::kFloat32 ? AllFinite(values, elements, isa)
                                                : AllFiniteHalf(values, elements, payload.type(), isa);
  };
  uint8_t scratch[sizeof(float)];
  size_t offset = 0;
  for (const Piece& piece : payload.pieces()) {
    const size_t end = offset + piece.size();
    // An element that began in an earlier piece and ends in this one.
    const size_t straddling = offset / width * width;
    if (straddling < offset && straddling + width <= end &&
        !finite(payload.Contiguous(straddling, width, scratch), 1)) {
      return false;
    }
    const size_t skip = (width - offset % width) % width;
    if (piece.size() > skip && !finite(piece.data() + skip, (piece.size() - skip) / width)) return false;
    offset = end;
  }
  return true;
}

std::optional<size_t> FindNotFinite(const std::vector<ReceivedSlice>& slices, Isa isa) {
  for (size_t i = 0; i < slices.size(); ++i) {
    const Payload& payload = slices[i].payload;
    if (payload.changeable()) continue;
    if (payload.bytes() % WireBytes(payload.type()) == 0 && !AllFinite(payload, isa)) return i;
  }
  return std::nullopt;
}

BufferSteps::BufferSteps(float mean_share, float difference_share)
    : assign_(std::make_unique<ShareStep<MoveTowardsKernel>>(1.0F)),
      mean_(std::make_unique<ShareStep<MoveTowardsKernel>>(mean_share)),
      add_(std::make_unique<ShareStep<AddShareKernel>>(1.0F)),
      add_share_(std::make_unique<ShareStep<AddShareKernel>>(difference_share)) {}

const Optimizer& BufferSteps::Of(TensorKind kind, v1::Contribution contribution) const {
  const bool mean = kind == TensorKind::kBufferMean;
  if (contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE) return mean ? *add_share_ : *add_;
  return mean ? *mean_ : *assign_;
}

}  // namespace ps
