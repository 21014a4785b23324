#include "worker/client/push_encoding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/check.h"
#include "common/finite.h"
#include "common/half_floats.h"
#include "common/top_k.h"

namespace ps {
namespace {

// velocity = momentum * before + values. Source: Lin et al., Deep Gradient Compression, 2018, 3.1.
struct MomentumKernel {
  PS_KERNEL void Run(size_t elements, const float* values, const float* before, float momentum, float* velocity) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) velocity[i] = momentum * before[i] + values[i];
  }
};

struct AddKernel {
  PS_KERNEL void Run(size_t elements, const float* a, const float* b, float* sum) {
#pragma omp simd
    for (size_t i = 0; i < elements; ++i) sum[i] = a[i] + b[i];
  }
};

// All elements.
bool EncodeWhole(const float* values, const SliceInfo& info, const ModelMemory::Place& place, uint8_t* to,
                 Residuals* residuals) {
  const auto elements = static_cast<size_t>(info.elements);
  if (place.type == WireType::kFloat32) {
    std::memcpy(to, values, elements * sizeof(float));
    return AllFinite(values, elements, BestIsa());
  }
  if (residuals == nullptr) return RoundHalf(values, elements, place.type, to, BestIsa());
  return RoundHalfKeeping(values, residuals->kept(info.index), elements, place.type, to, residuals->next(info.index),
                          BestIsa());
}

// All elements of a sum; what is not sent of it is left there.
bool EncodeSum(size_t elements, const ModelMemory::Place& place, uint8_t* to, float* left) {
  const std::vector<float> nothing(elements, 0.0F);
  if (place.type != WireType::kFloat32) {
    return RoundHalfKeeping(nothing.data(), left, elements, place.type, to, left, BestIsa());
  }
  std::memcpy(to, left, elements * sizeof(float));
  std::fill_n(left, elements, 0.0F);
  return AllFinite(reinterpret_cast<const float*>(to), elements, BestIsa());
}

// These elements of what is left; they are not left any more, but for what rounding takes away.
bool SendPositions(const std::vector<uint16_t>& positions, const ModelMemory::Place& place, uint8_t* to, float* left) {
  std::memcpy(to, positions.data(), place.positions);
  std::vector<float> sent(positions.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = std::exchange(left[positions[i]], 0.0F);
  uint8_t* const values = to + place.positions;
  if (place.type == WireType::kFloat32) {
    std::memcpy(values, sent.data(), place.values);
    return true;
  }
  const std::vector<float> nothing(sent.size(), 0.0F);
  const bool finite =
      RoundHalfKeeping(nothing.data(), sent.data(), sent.size(), place.type, values, sent.data(), BestIsa());
  for (size_t i = 0; i < sent.size(); ++i) left[positions[i]] = sent[i];
  return finite;
}

}  // namespace

bool EncodeSlice(const float* values, const SliceInfo& info, const SharedTensors& to, Residuals* residuals,
                 float momentum) {
  const auto elements = static_cast<size_t>(info.elements);
  const ModelMemory::Place place = to.model().slice(info);
  uint8_t* const bytes = to.bytes().data() + place.begin;
  Check(!place.sparse() || residuals != nullptr, "elements that are not sent are kept");
  // What was left of earlier pushes, or their momentum, may make it too large: then it is sent in several pushes.
  const bool half = place.type != WireType::kFloat32;
  const bool adds_up = place.sparse() || momentum != 0;  // Else RoundHalfKeeping looks.
  if (adds_up && half && !AllFit(values, elements, place.type, BestIsa())) return false;
  float* velocity = nullptr;
  if (momentum != 0) {
    velocity = residuals->next_velocity(info.index);
    RunKernel<MomentumKernel>(BestIsa(), elements, values, residuals->velocity(info.index), momentum, velocity);
    values = velocity;
  }
  if (!adds_up) return EncodeWhole(values, info, place, bytes, residuals);
  float* const left = residuals->next(info.index);
  RunKernel<AddKernel>(BestIsa(), elements, values, residuals->kept(info.index), left);
  if (!place.sparse()) return EncodeSum(elements, place, bytes, left);
  if (!AllFinite(left, elements, BestIsa())) return false;
  std::vector<uint16_t> positions(place.positions / sizeof(uint16_t));
  SelectLargest({left, elements}, positions);
  if (velocity != nullptr) {
    for (const uint16_t position : positions) velocity[position] = 0;
  }
  return SendPositions(positions, place, bytes, left);
}

}  // namespace ps
