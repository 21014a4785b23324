// The wall clock, for what people and other systems read. Nothing is decided by it.
#pragma once

#include <chrono>
#include <cstdint>

namespace ps {

inline uint64_t UnixMs() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
}

}  // namespace ps
