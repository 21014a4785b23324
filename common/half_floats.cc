#include "common/half_floats.h"

#include <cstring>

#include "common/simd.h"

namespace ps {
namespace {

[[gnu::always_inline]] inline void Store(uint32_t bits, uint8_t* to, size_t i) {
  const auto half = static_cast<uint16_t>(bits);
  std::memcpy(to + i * sizeof(half), &half, sizeof(half));
}

[[gnu::always_inline]] inline uint32_t Load(const uint8_t* from, size_t i) {
  uint16_t half;
  std::memcpy(&half, from + i * sizeof(half), sizeof(half));
  return half;
}

// 1, if the value is not finite, or is not once it is rounded.
template <typename Half>
[[gnu::always_inline]] inline uint32_t TooLarge(float value) {
  return static_cast<uint32_t>(MagnitudeBits(value) >= Half::kTooLarge);
}

template <typename Half>
struct RoundKernel {
  PS_KERNEL void Run(size_t elements, const float* values, uint8_t* rounded, uint32_t* bad) {
    uint32_t found = 0;
    for (size_t i = 0; i < elements; ++i) {
      const uint32_t bits = Half::Round(values[i]);
      found |= TooLarge<Half>(values[i]);
      Store(bits, rounded, i);
    }
    *bad = found;
  }
};

template <typename Half>
struct RoundKeepingKernel {
  PS_KERNEL void Run(size_t elements, const float* values, const float* residual, uint8_t* rounded, float* left,
                     uint32_t* bad) {
    uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (size_t i = 0; i < elements; ++i) {
      const float value = values[i] + residual[i];
      const uint32_t sign = (std::bit_cast<uint32_t>(value) >> 16) & 0x8000U;
      const uint32_t largest = (Half::kExponent - 1) | sign;
      const uint32_t bits = Choose(MagnitudeBits(value) >= Half::kTooLarge, largest, Half::Round(value));
      found |= static_cast<uint32_t>(MagnitudeBits(value) >= kFloatInfinity) | TooLarge<Half>(values[i]);
      Store(bits, rounded, i);
      left[i] = value - Half::Widen(bits);  // Exact, or what does not fit.
    }
    *bad = found;
  }
};

template <typename Half>
struct RoundThroughKernel {
  PS_KERNEL void Run(size_t elements, const float* values, float* rounded, uint32_t* bad) {
    uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (size_t i = 0; i < elements; ++i) {
      const float value = values[i];
      const uint32_t bits = Half::Round(value);
      found |= TooLarge<Half>(value);
      rounded[i] = Half::Widen(bits & 0xFFFFU);
    }
    *bad = found;
  }
};

template <typename Half>
struct WidenKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* rounded, float* values) {
    for (size_t i = 0; i < elements; ++i) values[i] = Half::Widen(Load(rounded, i));
  }
};

template <typename Half>
struct NotFiniteHalfKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* rounded, uint32_t* bad) {
    uint32_t found = 0;
    for (size_t i = 0; i < elements; ++i) {
      found |= static_cast<uint32_t>((Load(rounded, i) & Half::kExponent) == Half::kExponent);
    }
    *bad = found;
  }
};

template <typename Half>
struct TooLargeKernel {
  PS_KERNEL void Run(size_t elements, const float* values, uint32_t* bad) {
    uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (size_t i = 0; i < elements; ++i) found |= TooLarge<Half>(values[i]);
    *bad = found;
  }
};

template <template <typename> typename Kernel, typename... Args>
void RunHalf(WireType type, Isa isa, Args... args) {
  type == WireType::kBfloat16 ? RunKernel<Kernel<Bfloat16>>(isa, args...) : RunKernel<Kernel<Float16>>(isa, args...);
}

// For a kernel that says last whether it has found a value that is bad.
template <template <typename> typename Kernel, typename... Args>
bool FindNoneBad(WireType type, Isa isa, Args... args) {
  uint32_t bad = 0;
  RunHalf<Kernel>(type, isa, args..., &bad);
  return bad == 0;
}

}  // namespace

bool RoundHalf(const float* values, size_t elements, WireType type, uint8_t* rounded, Isa isa) {
  return FindNoneBad<RoundKernel>(type, isa, elements, values, rounded);
}

bool AllFit(const float* values, size_t elements, WireType type, Isa isa) {
  return FindNoneBad<TooLargeKernel>(type, isa, elements, values);
}

bool RoundHalfKeeping(const float* values, const float* residual, size_t elements, WireType type, uint8_t* rounded,
                      float* left, Isa isa) {
  return FindNoneBad<RoundKeepingKernel>(type, isa, elements, values, residual, rounded, left);
}

bool RoundThrough(const float* values, size_t elements, WireType type, float* rounded, Isa isa) {
  return FindNoneBad<RoundThroughKernel>(type, isa, elements, values, rounded);
}

void WidenHalf(const uint8_t* rounded, size_t elements, WireType type, float* values, Isa isa) {
  RunHalf<WidenKernel>(type, isa, elements, rounded, values);
}

bool AllFiniteHalf(const uint8_t* rounded, size_t elements, WireType type, Isa isa) {
  return FindNoneBad<NotFiniteHalfKernel>(type, isa, elements, rounded);
}

}  // namespace ps
