#include "server/reduce.h"

#include <algorithm>
#include <cstring>

#include "common/finite.h"

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

}  // namespace

bool ReduceAndApply(std::span<const GradientTerm> terms, const OptimizerBlock& slice, const Optimizer& optimizer,
                    const UpdateContext& context, Isa isa) {
  alignas(64) float sum[kBlockElements];
  alignas(64) uint8_t scratch[kBlockElements * sizeof(float)];
  bool finite = true;
  if (terms.empty()) std::fill(std::begin(sum), std::end(sum), 0.0F);
  for (size_t begin = 0; begin < slice.elements; begin += kBlockElements) {
    const size_t elements = std::min(kBlockElements, slice.elements - begin);
    for (size_t term = 0; term < terms.size(); ++term) {
      const uint8_t* gradient =
          terms[term].gradient->Contiguous(begin * sizeof(float), elements * sizeof(float), scratch);
      if (term == 0) {
        RunKernel<ScaleKernel>(isa, elements, gradient, terms[term].coefficient, &sum[0]);
      } else {
        RunKernel<AddScaledKernel>(isa, elements, gradient, terms[term].coefficient, &sum[0]);
      }
    }
    OptimizerBlock block = {.elements = elements,
                            .gradient = sum,
                            .weights = slice.weights + begin,
                            .new_weights = slice.new_weights + begin};
    for (int k = 0; k < optimizer.state_tensors(); ++k) {
      block.state[k] = slice.state[k] + begin;
      block.new_state[k] = slice.new_state[k] + begin;
    }
    optimizer.Apply(block, context, isa);
    finite = AllFinite(block.new_weights, elements, isa) && finite;  // While they are in the cache.
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
