#include "worker/link/top_k.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace top_k_test {

std::vector<uint16_t> BySorting(const std::vector<float>& values, size_t k) {
  std::vector<uint16_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint16_t a, uint16_t b) { return std::fabs(values[a]) > std::fabs(values[b]); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

TEST_CASE("The largest in magnitude are selected, of equal ones the first, in ascending order") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 300; ++round) {
    std::vector<float> values(2 + random() % 5000);
    const uint32_t kind = random() % 4;  // All different, many equal, subnormal, all zero.
    for (float& value : values) {
      if (kind == 0) value = normal(random);
      if (kind == 1) value = std::round(normal(random));
      if (kind == 2) value = normal(random) * 1e-42F;
    }
    std::vector<uint16_t> positions(1 + random() % (values.size() - 1));
    SelectLargest(values, positions);
    CHECK(positions == BySorting(values, positions.size()));
  }
}

}  // namespace top_k_test
}  // namespace ps
