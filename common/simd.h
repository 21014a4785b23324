// Run-time choice among instruction sets for loops that the compiler vectorises. Every variant does the same operations
// in the same order without fused multiply-add, so all give equal bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ps {

enum class Isa { kPortable, kAvx2, kAvx512 };

// The best that this processor has.
inline Isa BestIsa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

// A kernel is a struct with a static function Run, marked PS_KERNEL so that it is compiled anew for each variant.
#define PS_KERNEL [[gnu::always_inline]] static inline

#if defined(__x86_64__)
template <typename Kernel, typename... Args>
[[gnu::target("avx2")]] void RunAvx2(Args... args) {
  Kernel::Run(args...);
}
template <typename Kernel, typename... Args>
#if defined(__clang__)
[[gnu::target("avx512f,avx512vl,avx512bw,avx512dq")]]
#else
[[gnu::target("avx512f,avx512vl,avx512bw,avx512dq,prefer-vector-width=512")]]
#endif
void RunAvx512(Args... args) {
  Kernel::Run(args...);
}
#endif

template <typename Kernel, typename... Args>
void RunKernel(Isa isa, Args... args) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return RunAvx512<Kernel>(args...);
  if (isa == Isa::kAvx2) return RunAvx2<Kernel>(args...);
#else
  (void)isa;
#endif
  Kernel::Run(args...);
}

// A float32 as the 32 bits that it is stored in (IEEE 754).
inline constexpr uint32_t kFloatInfinity = 0x7F800000U;  // Its exponent is all ones, as is that of NaN.

// All but the sign. They grow with the magnitude; those of infinity and NaN are at least kFloatInfinity.
[[gnu::always_inline]] inline uint32_t MagnitudeBits(float value) {
  return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFU;
}

struct NotFiniteKernel {
  PS_KERNEL void Run(size_t elements, const uint8_t* values, uint32_t* found) {
    uint32_t bad = 0;
    for (size_t i = 0; i < elements; ++i) {
      float value;
      std::memcpy(&value, values + i * sizeof(value), sizeof(value));
      bad |= static_cast<uint32_t>(MagnitudeBits(value) >= kFloatInfinity);
    }
    *found = bad;
  }
};

// True if all of the floats at `values`, which need not be aligned, are finite.
inline bool AllFinite(const void* values, size_t elements, Isa isa) {
  uint32_t found = 0;
  RunKernel<NotFiniteKernel>(isa, elements, static_cast<const uint8_t*>(values), &found);
  return found == 0;
}

// Arithmetic without subnormal numbers. A running mean whose gradient has become 0 decays into them and stays there,
// and Intel's processors take 10 times as long for a vector that has one.
//
// While it lives, this thread's vector arithmetic takes floats below 1.2e-38 for 0 and makes 0 of them, with AVX2,
// AVX-512 and without either alike. On other processors than x86-64 it does nothing.
class [[maybe_unused]] FlushSubnormals {
#if defined(__x86_64__)
 public:
  FlushSubnormals() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | kFlushToZero | kSubnormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(kept_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kSubnormalsAreZero = 0x0040;
  const unsigned kept_;
#endif
};

}  // namespace ps
