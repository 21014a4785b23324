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

TEST_CASE("A hash of parts is that of the whole") {
  const std::vector<float> values = {1, 2, 3, 4};
  const std::span<const char> bytes(reinterpret_cast<const char*>(values.data()), sizeof(float) * values.size());
  RunningHash hash;
  CHECK(hash.Hex() == "99aa06d3014798d86001c324468d497f");
  hash.Add(bytes.first(5));
  hash.Add(bytes.subspan(5));
  RunningHash whole;
  whole.Add(bytes);
  CHECK(hash.Hex() == whole.Hex());
}

}  // namespace
}  // namespace ps
