#include "server/reduce.h"

#include <algorithm>
#include <cstring>

#include "common/finite.h"
#include "common/subnormals.h"

namespace ps {
namespace {

// 16 KiB: the block's sum stays in the first-level cache between the reduction and the optimizer.
constexpr size_t kBlockElements = 4096;

// Received floats lie at any address, so they are read with memcpy, which compiles to unaligned vector loads.
struct ScaleKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* gradient, float coefficient, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      float value;
      std::memcpy(&value, gradient + i * sizeof(float), sizeof(float));
      sum[i] = coefficient * value;
    }
  }
};

struct AddScaledKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* gradient, float coefficient, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) {
      float value;
      std::memcpy(&value, gradient + i * sizeof(float), sizeof(float));
      sum[i] = sum[i] + coefficient * value;
    }
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

// The sum of this block's gradients.
void Reduce(std::span<const GradientTerm> terms, size_t begin, size_t elements, Isa isa, float* sum) {
  alignas(64) uint8_t scratch[kBlockElements * sizeof(float)];
  for (size_t term = 0; term < terms.size(); ++term) {
    const uint8_t* gradient =
        terms[term].gradient->Contiguous(begin * sizeof(float), elements * sizeof(float), scratch);
    if (term == 0) {
      RunKernel<ScaleKernel>(isa, elements, gradient, terms[term].coefficient, sum);
    } else {
      RunKernel<AddScaledKernel>(isa, elements, gradient, terms[term].coefficient, sum);
    }
  }
}

}  // namespace

bool ReduceAndApply(std::span<const VersionInput> versions, const OptimizerBlock& slice, const Optimizer& optimizer,
                    Isa isa) {
  const FlushSubnormals flush;
  alignas(64) float sum[kBlockElements];
  bool finite = true;
  for (size_t begin = 0; begin < slice.elements; begin += kBlockElements) {
    OptimizerBlock block = {.elements = std::min(kBlockElements, slice.elements - begin),
                            .gradient = sum,
                            .weights = slice.weights + begin,
                            .new_weights = slice.new_weights + begin};
    for (int k = 0; k < optimizer.state_tensors(); ++k) {
      block.state[k] = slice.state[k] + begin;
      block.new_state[k] = slice.new_state[k] + begin;
    }
    for (const VersionInput& version : versions) {
      Reduce(version.terms, begin, block.elements, isa, &sum[0]);
      if (version.delay_compensation != 0) {
        RunKernel<CompensateKernel>(isa, block.elements, block.weights, version.pulled + begin,
                                    version.delay_compensation, &sum[0]);
      }
      optimizer.Apply(block, version.context, isa);
      block.weights = block.new_weights;  // The next version is made of this one.
      std::copy(std::begin(block.new_state), std::end(block.new_state), std::begin(block.state));
    }
    finite = AllFinite(block.new_weights, block.elements, isa) && finite;  // While they are in the cache.
  }
  return finite;
}

float Coefficient(uint64_t samples, uint64_t total) {
  return static_cast<float>(static_cast<double>(samples) / static_cast<double>(total));
}

bool AllFinite(const Payload& payload, Isa isa) {
  uint8_t scratch[sizeof(float)];
  size_t offset = 0;
  for (const Piece& piece : payload.pieces()) {
    const size_t end = offset + piece.size();
    // A float that began in an earlier piece and ends in this one.
    const size_t straddling = offset / sizeof(float) * sizeof(float);
    if (straddling < offset && straddling + sizeof(float) <= end &&
        !AllFinite(payload.Contiguous(straddling, sizeof(float), scratch), 1, isa)) {
      return false;
    }
    const size_t skip = (sizeof(float) - offset % sizeof(float)) % sizeof(float);
    if (piece.size() > skip && !AllFinite(piece.data() + skip, (piece.size() - skip) / sizeof(float), isa)) {
      return false;
    }
    offset = end;
  }
  return true;
}

const ReceivedSlice* FindNotFinite(const std::vector<ReceivedSlice>& slices, Isa isa) {
  for (const ReceivedSlice& slice : slices) {
    if (slice.payload.bytes() % sizeof(float) == 0 && !AllFinite(slice.payload, isa)) return &slice;
  }
  return nullptr;
}

}  // namespace ps
