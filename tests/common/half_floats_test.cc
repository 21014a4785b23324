#include "common/half_floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "tests/catch.h"

namespace ps {
namespace half_floats_test {

const std::vector<Isa> kIsas = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

bool Has(Isa isa) { return static_cast<int>(isa) <= static_cast<int>(BestIsa()); }

// What the bits say, by the definition: (-1)^s * 2^(e - bias) * 1.f, or 2^(1 - bias) * 0.f.
double Meaning(uint16_t bits, WireType type) {
  const int fraction_bits = type == WireType::kBfloat16 ? 7 : 10;
  const int bias = type == WireType::kBfloat16 ? 127 : 15;
  const int exponent = (bits & 0x7FFF) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                                    : std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  return (bits & 0x8000) != 0 ? -size : size;
}

bool IsFinite(uint16_t bits, WireType type) {
  const int exponent = type == WireType::kBfloat16 ? 0x7F80 : 0x7C00;
  return (bits & exponent) != exponent;
}

// By search among all values, which grow with their bits. Nothing: it is not finite.
std::optional<uint16_t> Nearest(float value, WireType type) {
  const uint16_t infinity = type == WireType::kBfloat16 ? 0x7F80 : 0x7C00;
  const double size = std::fabs(static_cast<double>(value));
  uint16_t below = 0;
  for (int bit = 0x4000; bit > 0; bit >>= 1) {
    if (below + bit < infinity && Meaning(static_cast<uint16_t>(below + bit), type) <= size) below += bit;
  }
  // Above the largest the next is where infinity is.
  const double down = size - Meaning(below, type);
  const double up = Meaning(static_cast<uint16_t>(below + 1), type) - size;
  const uint16_t nearest = down < up || (down == up && below % 2 == 0) ? below : below + 1;
  if (nearest >= infinity) return std::nullopt;
  return nearest | (std::signbit(value) ? 0x8000 : 0);
}

std::vector<uint16_t> Rounded(const std::vector<float>& values, WireType type, Isa isa, bool* finite) {
  std::vector<uint16_t> rounded(values.size());
  *finite = RoundHalf(values.data(), values.size(), type, reinterpret_cast<uint8_t*>(rounded.data()), isa);
  return rounded;
}

std::vector<float> Widened(const std::vector<uint16_t>& bits, WireType type, Isa isa) {
  std::vector<float> values(bits.size());
  WidenHalf(reinterpret_cast<const uint8_t*>(bits.data()), bits.size(), type, values.data(), isa);
  return values;
}

TEST_CASE("All values of two bytes are widened to what they mean, and rounded to themselves") {
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const Isa isa : kIsas) {
      if (!Has(isa)) continue;
      std::vector<uint16_t> finite_bits;
      std::vector<uint16_t> all(65536);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      const std::vector<float> widened = Widened(all, type, isa);
      for (const uint16_t bits : all) {
        if (IsFinite(bits, type)) {
          finite_bits.push_back(bits);
          const double meaning = Meaning(bits, type);
          if (widened[bits] != meaning || std::signbit(widened[bits]) != std::signbit(meaning)) {
            FAIL(bits << " is " << widened[bits]);
          }
        } else if (std::isfinite(widened[bits])) {
          FAIL(bits << " is finite");
        }
        const auto* const one = reinterpret_cast<const uint8_t*>(&bits);
        if (AllFiniteHalf(one, 1, type, isa) != IsFinite(bits, type)) FAIL("finite: " << bits);
      }
      bool finite = false;
      CHECK(Rounded(Widened(finite_bits, type, isa), type, isa, &finite) == finite_bits);
      CHECK(finite);
    }
  }
}

TEST_CASE("Floats are rounded to the nearest value, of two that are as near to the even one") {
  std::mt19937 random(1);
  std::vector<float> values;
  for (int i = 0; i < 100000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (std::isfinite(value)) values.push_back(value);
    values.push_back(std::ldexp(static_cast<float>(random() % 100000) / 65536, static_cast<int>(random() % 60) - 40));
  }
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (uint16_t bits = 0; bits < 0x7BFF; bits += 7) {  // In the middle, and just beside it.
      const auto middle = static_cast<float>((Meaning(bits, type) + Meaning(bits + 1, type)) / 2);
      for (const float value : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e30F)}) {
        values.push_back(value);
        values.push_back(-value);
      }
    }
    for (const Isa isa : kIsas) {
      if (!Has(isa)) continue;
      bool finite = false;
      const std::vector<uint16_t> rounded = Rounded(values, type, isa, &finite);
      for (size_t i = 0; i < values.size(); ++i) {
        const std::optional<uint16_t> expected = Nearest(values[i], type);
        if (expected.has_value() && rounded[i] != *expected) FAIL(values[i] << " is rounded to " << rounded[i]);
        uint8_t one[2];
        if (RoundHalf(&values[i], 1, type, one, isa) != expected.has_value()) {
          FAIL(values[i] << ": finite or not");
        }
      }
    }
  }
}

TEST_CASE("What is not finite, or is not once it is rounded, is refused wherever it stands") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto largest = std::numeric_limits<float>::max();
  struct Case {
    WireType type;
    float value;
    bool finite;
  };
  const std::vector<Case> cases = {{WireType::kBfloat16, kInfinity, false},
                                   {WireType::kBfloat16, -kInfinity, false},
                                   {WireType::kBfloat16, std::nanf(""), false},
                                   {WireType::kBfloat16, std::bit_cast<float>(0x7FFFFFFFU), false},
                                   {WireType::kBfloat16, largest, false},  // Nearer to 2^128.
                                   {WireType::kBfloat16, std::bit_cast<float>(0x7F7F7FFFU), true},
                                   {WireType::kFloat16, kInfinity, false},
                                   {WireType::kFloat16, std::nanf(""), false},
                                   {WireType::kFloat16, std::bit_cast<float>(0xFFFFFFFFU), false},
                                   {WireType::kFloat16, 65520, false},
                                   {WireType::kFloat16, std::nextafter(65520.0F, 0.0F), true},
                                   {WireType::kFloat16, -1e30F, false}};
  for (const Case& each : cases) {
    for (const Isa isa : kIsas) {
      if (!Has(isa)) continue;
      for (const size_t at : {0, 30, 66}) {
        std::vector<float> values(67, 1.5F);
        values[at] = each.value;
        const std::vector<float> zeros(values.size(), 0.0F);
        std::vector<float> out(values.size());
        std::vector<uint8_t> rounded(2 * values.size() + 1);
        CAPTURE(each.value, static_cast<int>(each.type), static_cast<int>(isa), at);
        CHECK(RoundHalf(values.data(), values.size(), each.type, rounded.data() + 1, isa) == each.finite);
        CHECK(RoundThrough(values.data(), values.size(), each.type, out.data(), isa) == each.finite);
        CHECK(AllFit(values.data(), values.size(), each.type, isa) == each.finite);
        CHECK(RoundHalfKeeping(values.data(), zeros.data(), values.size(), each.type, rounded.data() + 1, out.data(),
                               isa) == each.finite);
        CHECK(RoundHalfKeeping(zeros.data(), values.data(), values.size(), each.type, rounded.data() + 1, out.data(),
                               isa) == std::isfinite(each.value));
      }
    }
  }
}

TEST_CASE("A sum that is too large is rounded to the largest number of its sign, and the rest is left") {
  const auto largest = std::numeric_limits<float>::max();
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    const bool is_bfloat16 = type == WireType::kBfloat16;
    const float most = is_bfloat16 ? std::bit_cast<float>(0x7F7F0000U) : 65504.0F;
    const float too_large = is_bfloat16 ? largest : 65520.0F;
    for (const Isa isa : kIsas) {
      if (!Has(isa)) continue;
      for (const float sign : {1.0F, -1.0F}) {
        CAPTURE(static_cast<int>(type), static_cast<int>(isa), sign);
        // Together too large by a little, by much, not at all, and not finite.
        std::vector<float> values(35, sign);
        std::vector<float> residual(values.size(), 0.0F);
        values[3] = sign * most;
        residual[3] = sign * (too_large - most);
        values[33] = residual[33] = sign * most / 2;
        residual[34] = sign * (is_bfloat16 ? most : 3.0F * 65504.0F);
        std::vector<uint8_t> rounded(2 * values.size());
        std::vector<float> left(values.size());
        std::vector<float> sent(values.size());
        REQUIRE(
            RoundHalfKeeping(values.data(), residual.data(), values.size(), type, rounded.data(), left.data(), isa));
        WidenHalf(rounded.data(), sent.size(), type, sent.data(), isa);
        CHECK(sent[3] == sign * most);
        CHECK(left[3] == sign * (too_large - most));
        CHECK(sent[33] == sign * most);
        CHECK(left[33] == 0);
        CHECK(sent[34] == sign * most);
        CHECK(left[34] == values[34] + residual[34] - sent[34]);
        values[34] = residual[34] = sign * (is_bfloat16 ? most : largest);
        CHECK_FALSE(
            RoundHalfKeeping(values.data(), residual.data(), values.size(), type, rounded.data(), left.data(), isa));
      }
    }
  }
}

TEST_CASE("What rounding takes away is exact, and rounding through is rounding and widening") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 0.01F);
  std::vector<float> values(1003);
  std::vector<float> residual(values.size());
  for (float& value : values) value = normal(random);
  for (float& value : residual) value = normal(random) * 1e-3F;
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const Isa isa : kIsas) {
      if (!Has(isa)) continue;
      std::vector<uint16_t> rounded(values.size());
      std::vector<float> left = residual;
      REQUIRE(RoundHalfKeeping(values.data(), left.data(), values.size(), type,
                               reinterpret_cast<uint8_t*>(rounded.data()), left.data(), isa));
      std::vector<float> sums(values.size());
      for (size_t i = 0; i < values.size(); ++i) sums[i] = values[i] + residual[i];
      bool finite = false;
      CHECK(Rounded(sums, type, isa, &finite) == rounded);
      const std::vector<float> widened = Widened(rounded, type, isa);
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(static_cast<double>(widened[i]) + left[i] == static_cast<double>(sums[i]));
      }
      std::vector<float> through(values.size());
      REQUIRE(RoundThrough(sums.data(), sums.size(), type, through.data(), isa));
      CHECK(through == widened);
    }
  }
}

}  // namespace half_floats_test
}  // namespace ps
