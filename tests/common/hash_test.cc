#include "common/hash.h"

#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("The weights hash depends on every slice and their order, and is 32 hexadecimal digits") {
  const std::vector<float> a(100, 1.0F);
  const std::vector<float> b(100, 2.0F);
  const std::string hash = WeightsHash({HashSlice(a), HashSlice(b)});
  CHECK(hash.size() == 32);
  CHECK(hash == WeightsHash({HashSlice(a), HashSlice(b)}));
  CHECK(hash != WeightsHash({HashSlice(b), HashSlice(a)}));
  CHECK(hash != WeightsHash({HashSlice(a)}));
}

TEST_CASE("The hash of nothing is XXH3-128's of empty input, in canonical byte order") {
  CHECK(WeightsHash({}) == "99aa06d3014798d86001c324468d497f");
}

}  // namespace
}  // namespace ps
