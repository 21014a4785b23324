// Whom others wait for, and for how long they have.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace ps {

struct RankWait {
  // A wait that is shorter is nothing that anybody is told of.
  static constexpr std::chrono::milliseconds kNoticed{100};

  std::vector<uint32_t> ranks;  // Ascending; empty: nobody waits, or not for long.
  std::chrono::nanoseconds time{0};
};

}  // namespace ps
