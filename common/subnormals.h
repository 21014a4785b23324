// Arithmetic without subnormal numbers. A running mean whose gradient has become 0 decays into them and stays there,
// and Intel's processors take 10 times as long for a vector that has one.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ps {

// While it lives, this thread's vector arithmetic takes floats below 1.2e-38 for 0 and makes 0 of them, with AVX2,
// AVX-512 and without either alike. On other processors than x86-64 it does nothing.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : kept_(_mm_getcsr()) { _mm_setcsr(kept_ | kFlushToZero | kSubnormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(kept_); }
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kSubnormalsAreZero = 0x0040;
  const unsigned kept_;
#endif
};

}  // namespace ps
