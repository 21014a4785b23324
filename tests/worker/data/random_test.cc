#include "common/random.h"

#include <array>
#include <cmath>
#include <set>

#include "tests/catch.h"
#include "worker/data/sampler.h"

namespace ps {
namespace {

TEST_CASE("bounded draws stay in range and are even") {
  std::mt19937_64 random = MakeRandom(1, 0);
  std::array<int, 7> counts = {};
  for (int i = 0; i < 70000; ++i) ++counts.at(UniformBelow(random, 7));
  // 10,000 expected of each, with a standard deviation of 93.
  for (const int count : counts) CHECK(std::abs(count - 10000) < 500);
  for (int i = 0; i < 100; ++i) CHECK(UniformBelow(random, 1) == 0);
  const uint64_t large = (uint64_t{1} << 63) + 1;  // Nearly half of all draws must be rejected.
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const uint64_t value = UniformBelow(random, large);
    REQUIRE(value < large);
    sum += static_cast<double>(value) / static_cast<double>(large);
  }
  CHECK(sum / 10000 == Approx(0.5).margin(0.02));
}

TEST_CASE("uniform floats are below 1 with 24 bits") {
  std::mt19937_64 random = MakeRandom(2, 0);
  double sum = 0;
  for (int i = 0; i < 10000; ++i) {
    const float value = UniformFloat(random);
    REQUIRE(value >= 0.0F);
    REQUIRE(value < 1.0F);
    REQUIRE(value * 0x1p24F == std::floor(value * 0x1p24F));
    sum += value;
  }
  CHECK(sum / 10000 == Approx(0.5).margin(0.02));
}

TEST_CASE("seeds and streams give different sequences") {
  std::set<uint64_t> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (uint64_t stream = 0; stream < 20; ++stream) first.insert(MakeRandom(seed, stream)());
    first.insert(MakeRandom(seed, kValidationStream)());
    first.insert(MakeRandom(seed, kSyntheticStream)());
  }
  CHECK(first.size() == 20 * 22);
}

TEST_CASE("every order of three items is equally likely") {
  std::mt19937_64 random = MakeRandom(3, 0);
  std::array<int, 27> counts = {};
  for (int i = 0; i < 60000; ++i) {
    std::array<size_t, 3> items = {0, 1, 2};
    PermuteInPlace(random, std::span<size_t>(items));
    ++counts.at(items[0] * 9 + items[1] * 3 + items[2]);
  }
  int orders = 0;
  for (const int count : counts) {
    if (count == 0) continue;
    ++orders;
    CHECK(std::abs(count - 10000) < 500);
  }
  CHECK(orders == 6);
}

}  // namespace
}  // namespace ps
