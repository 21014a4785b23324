// Time as the system's parts are given it: monotonic, passed in, never read inside.
#pragma once

#include <chrono>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"

namespace ps {

using TimePoint = std::chrono::steady_clock::time_point;

inline TimePoint Now() { return std::chrono::steady_clock::now(); }

inline std::chrono::nanoseconds ToChrono(absl::Duration duration) { return absl::ToChronoNanoseconds(duration); }

inline double Seconds(std::chrono::nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

// "12 s", "0.3 s", for messages.
inline std::string FormatSeconds(std::chrono::nanoseconds duration) {
  const double seconds = Seconds(duration);
  return absl::StrFormat("%.*f s", seconds < 10 ? 1 : 0, seconds);
}

}  // namespace ps
