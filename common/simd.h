// Run-time choice among instruction sets for loops that the compiler vectorises. Every variant does the same operations
// in the same order without fused multiply-add, so all give equal bits.
#pragma once

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
#if defined(__clang__)
template <typename Kernel, typename... Args>
[[gnu::target("avx512f,avx512vl,avx512bw,avx512dq")]] void RunAvx512(Args... args) {
  Kernel::Run(args...);
}
#else
template <typename Kernel, typename... Args>
[[gnu::target("avx512f,avx512vl,avx512bw,avx512dq,prefer-vector-width=512")]] void RunAvx512(Args... args) {
  Kernel::Run(args...);
}
#endif
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

}  // namespace ps
