#include "common/clipping.h"

#include <cmath>
#include <limits>
#include <random>

#include "tests/catch.h"

namespace ps {
namespace {

std::vector<float> SomeFloats(size_t count) {
  std::mt19937 random(3);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<double>(random()) / 1e9 - 2.0);
  return values;
}

TEST_CASE("A sum of squares has the bits of 16 plain sums, on every instruction set, however it is cut") {
  const std::vector<float> values = SomeFloats(10007);
  double lanes[16] = {};
  for (size_t i = 0; i < values.size(); ++i) lanes[i % 16] += static_cast<double>(values[i]) * values[i];
  double expected = 0;
  for (const double lane : lanes) expected += lane;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    for (const size_t block : {size_t{16}, size_t{4096}, size_t{16384}}) {
      SquareSum sum;
      for (size_t begin = 0; begin < values.size(); begin += block) {
        sum.Add(&values[begin], std::min(block, values.size() - begin), isa);
      }
      CHECK(sum.total() == expected);
    }
  }
  CHECK(SquareSum().total() == 0);
}

TEST_CASE("Squares of the largest floats do not overflow") {
  const std::vector<float> largest(100, std::numeric_limits<float>::max());
  SquareSum sum;
  sum.Add(largest.data(), largest.size(), BestIsa());
  CHECK(std::isfinite(sum.total()));
}

TEST_CASE("A gradient is scaled as torch.nn.utils.clip_grad_norm_ scales it, and never up") {
  const std::vector<double> squares = {9, 16};
  CHECK(ClipFactors({}, squares) == std::vector<float>{1, 1});
  CHECK(ClipFactors({.norm = 6.0F}, squares) == std::vector<float>{1, 1});
  const auto factor = static_cast<float>(2.5 / (5 + 1e-6));
  CHECK(ClipFactors({.norm = 2.5F}, squares) == std::vector<float>{factor, factor});
  CHECK(ClipFactors({.tensor_norm = 3.5F}, squares) == std::vector<float>{1, static_cast<float>(3.5 / (4 + 1e-6))});
  CHECK(ClipFactors({.norm = 1.0F}, std::vector<double>{0, 0}) == std::vector<float>{1, 1});
  CHECK(ClipFactors({.norm = 1.0F}, std::vector<double>{std::numeric_limits<double>::infinity()})[0] == 0);
}

TEST_CASE("The norm of all tensors is that of tensors whose own norms are clipped already") {
  const std::vector<double> squares = {9, 16};
  const double first = 1 / (3 + 1e-6);
  const double second = 1 / (4 + 1e-6);
  const double norm = std::sqrt(first * first * 9 + second * second * 16);
  const double all = 0.5 / (norm + 1e-6);
  CHECK(ClipFactors({.tensor_norm = 1.0F, .norm = 0.5F}, squares) ==
        std::vector<float>{static_cast<float>(first * all), static_cast<float>(second * all)});
}

TEST_CASE("Elements are clipped to the limit on both sides, and what is not a number stays so") {
  const std::vector<float> values = SomeFloats(1003);
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > BestIsa()) continue;
    std::vector<float> clipped = values;
    clipped[7] = std::numeric_limits<float>::quiet_NaN();
    ClipValues(clipped.data(), clipped.size(), 0.75F, isa);
    CHECK(std::isnan(clipped[7]));
    clipped[7] = std::min(0.75F, std::max(-0.75F, values[7]));
    bool same = true;
    for (size_t i = 0; i < values.size(); ++i) {
      same = same && clipped[i] == std::min(0.75F, std::max(-0.75F, values[i]));
    }
    CHECK(same);
  }
}

}  // namespace
}  // namespace ps
