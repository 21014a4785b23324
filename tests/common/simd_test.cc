#include "common/simd.h"

#include <limits>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("NaN and infinity are found at every place, on every instruction set, at any alignment") {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    std::vector<uint8_t> memory(4 * 70 + 3);
    for (size_t shift = 0; shift < 4; ++shift) {
      std::vector<float> values(69, std::numeric_limits<float>::max());
      std::memcpy(memory.data() + shift, values.data(), 4 * values.size());
      CHECK(AllFinite(memory.data() + shift, values.size(), isa));
      for (size_t at = 0; at < values.size(); ++at) {
        values[at] = bad[at % 3];
        std::memcpy(memory.data() + shift, values.data(), 4 * values.size());
        CHECK_FALSE(AllFinite(memory.data() + shift, values.size(), isa));
        values[at] = 0;
      }
    }
  }
}

}  // namespace
}  // namespace ps
