#include "common/e3m0.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ps/wire_type.h"
#include "tests/catch.h"

namespace ps {
namespace e3m0_test {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

constexpr float kHalfWay = 0x1.6a09e6p-1F;

bool Has(Isa isa) { return static_cast<int>(isa) <= static_cast<int>(BestIsa()); }

Bytes Encoded(const Floats& values, float* left = nullptr, Isa isa = BestIsa()) {
  Bytes encoded(WireBytes(WireType::kE3m0, values.size()));
  CHECK(EncodeE3m0(values.data(), values.size(), encoded.data(), left, isa));
  return encoded;
}

Floats Decoded(const Bytes& encoded, size_t elements) {
  Floats values(elements);
  DecodeE3m0(encoded.data(), elements, values.data());
  return values;
}

TEST_CASE("Each of the sixteen codes stands for its power of two of the scale") {
  const float scale = 3;
  Bytes encoded(WireBytes(WireType::kE3m0, 16));
  std::memcpy(encoded.data(), &scale, sizeof(scale));
  for (uint8_t pair = 0; pair < 8; ++pair) encoded[4 + pair] = static_cast<uint8_t>(2 * pair | (2 * pair + 1) << 4);
  const Floats values = Decoded(encoded, 16);
  CHECK(values == Floats{0, 3.F / 64, 3.F / 32, 3.F / 16, 3.F / 8, 3.F / 4, 3.F / 2, 3,  //
                         0, -3.F / 64, -3.F / 32, -3.F / 16, -3.F / 8, -3.F / 4, -3.F / 2, -3});
}

TEST_CASE(
    "A value goes to the nearest level in the logarithm, from half way on to the upper one, and below the last to 0") {
  for (const float scale : {1.0F, 3.0F, 1e-30F, 3e38F}) {
    const float half_way = scale * kHalfWay;
    Floats values = {scale};
    Floats expected = {scale};
    const auto add = [&](float value, float level) {
      for (const float sign : {1.0F, -1.0F}) {
        values.push_back(sign * value);
        expected.push_back(level == 0 ? 0 : sign * level);
      }
    };
    for (int below = 0; below < 7; ++below) {
      const float tie = std::ldexp(half_way, -below);
      add(tie, std::ldexp(scale, -below));
      add(std::nextafter(tie, 0.0F), below == 6 ? 0 : std::ldexp(scale, -below - 1));
    }
    add(0, 0);
    Floats left(values.size());
    CHECK(Decoded(Encoded(values, left.data()), values.size()) == expected);
    for (size_t i = 0; i < values.size(); ++i) CHECK(left[i] == values[i] - expected[i]);
  }
}

TEST_CASE("All instruction sets give equal bytes, and sent + left is the input, exactly") {
  std::mt19937 random(3);
  for (const size_t elements : {1, 2, 255, 256, 257, 511, 5000}) {
    Floats values(elements);
    for (float& value : values) {
      value = std::ldexp(std::normal_distribution<float>()(random), static_cast<int>(random() % 12));
    }
    const Bytes expected = Encoded(values, nullptr, Isa::kPortable);
    for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
      if (!Has(isa)) continue;
      Floats left = values;
      CHECK(Encoded(left, left.data(), isa) == expected);  // In place.
      const Floats sent = Decoded(expected, elements);
      for (size_t i = 0; i < elements; ++i) {
        REQUIRE(static_cast<double>(sent[i]) + static_cast<double>(left[i]) == static_cast<double>(values[i]));
        if (sent[i] != 0) REQUIRE(std::signbit(sent[i]) == std::signbit(values[i]));
      }
    }
  }
}

TEST_CASE("Each block has a scale of its own, and one of zeros, or of nearly nothing, is sent as zeros") {
  Floats values(3 * kE3m0Block + 5, 0.0F);
  values[10] = 1e20F;
  values[kE3m0Block] = 1e-20F;
  values[3 * kE3m0Block + 4] = -std::numeric_limits<float>::denorm_min();
  Floats left(values.size());
  const Floats sent = Decoded(Encoded(values, left.data()), values.size());
  CHECK(sent[10] == 1e20F);
  CHECK(sent[kE3m0Block] == 1e-20F);
  CHECK(std::count_if(sent.begin(), sent.end(), [](float value) { return value != 0; }) == 2);
  CHECK(left[3 * kE3m0Block + 4] == values[3 * kE3m0Block + 4]);
}

TEST_CASE("A value that is not finite is found before it is sent, and a scale that is none where it is decoded") {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::nanf(""), std::nanf("")}) {
    Floats values(1000, 0.25F);
    values[777] = bad;
    Bytes encoded(WireBytes(WireType::kE3m0, values.size()));
    CHECK_FALSE(EncodeE3m0(values.data(), values.size(), encoded.data(), nullptr, BestIsa()));
  }
  for (const float scale : {std::numeric_limits<float>::infinity(), std::nanf(""), -1.0F, -0.0F}) {
    Bytes encoded(WireBytes(WireType::kE3m0, 16));
    std::memcpy(encoded.data(), &scale, sizeof(scale));
    for (uint8_t pair = 0; pair < 8; ++pair) encoded[4 + pair] = static_cast<uint8_t>(2 * pair | (2 * pair + 1) << 4);
    for (const float value : Decoded(encoded, 16)) CHECK_FALSE(std::isfinite(value));
  }
}

TEST_CASE("So many bytes are so many elements, or no whole blocks") {
  for (const size_t elements : {0, 1, 2, 5, 255, 256, 257, 5000, 32768}) {
    CHECK(E3m0Elements(WireBytes(WireType::kE3m0, elements)) == (elements + 1) / 2 * 2);
  }
  for (const size_t bytes : {1, 4, 132 + 1, 132 + 4}) CHECK_FALSE(E3m0Elements(bytes).has_value());
  CHECK(WireBytes(WireType::kE3m0, 32768) == 16896);  // 7.8 times less than float32.
}

}  // namespace e3m0_test
}  // namespace ps
