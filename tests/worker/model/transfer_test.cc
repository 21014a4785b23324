// What a backend does with values on their way to servers and back, on every backend that is here.
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "common/half_floats.h"
#include "common/local/shared_memory.h"
#include "tests/worker/model/on_device.h"

namespace ps {
namespace {

// Against the client's own rounding: what can go wrong in it, and random values. Any count, from 1 on.
void CheckRound(Backend& backend) {
  std::mt19937 random(5);
  Values values;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t fraction : {0U, 1U, 0xFFFU, 0x1000U, 0x1001U, 0x3000U, 0x7FFFU, 0x8000U, 0x8001U, 0x18000U,
                                    0x7FEFFFU, 0x7FF000U, 0x7FFFFFU}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | fraction));
      values.push_back(-values.back());
    }
  }
  while (values.size() < 70'001) {
    const auto bits = static_cast<uint32_t>(random());
    if ((bits & 0x7F800000U) != 0x7F800000U) values.push_back(std::bit_cast<float>(bits));
  }
  OnDevice device(backend);
  const float* const given = device.Put(values);
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    for (const size_t count : {size_t{1}, size_t{2}, size_t{7}, values.size() - 1, values.size()}) {
      CAPTURE(static_cast<int>(type), count);
      std::vector<uint16_t> expected(count + 1, 0xABCD);  // What is behind it is left alone.
      uint16_t* const rounded = device.Put(expected);
      (void)RoundHalf(values.data(), count, type, reinterpret_cast<uint8_t*>(expected.data()), Isa::kPortable);
      REQUIRE(backend.Round(given, static_cast<int64_t>(count), type, rounded).ok());
      CHECK(device.Get(rounded, count + 1) == expected);
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const float bad : {kInfinity, -kInfinity, std::nanf(""), std::bit_cast<float>(0x7FFFFFFFU),
                            std::bit_cast<float>(0xFFFFFFFFU), std::numeric_limits<float>::max()}) {
      const Values both = {1, bad, 1};
      uint16_t* const rounded = device.Put(std::vector<uint16_t>(3));
      REQUIRE(backend.Round(device.Put(both), 3, type, rounded).ok());
      const std::vector<uint16_t> found = device.Get(rounded, 3);
      CHECK_FALSE(AllFiniteHalf(reinterpret_cast<const uint8_t*>(found.data()), 3, type, Isa::kPortable));
    }
  }
}

// Wherever it is, of each type; and what was found earlier is forgotten.
void CheckFinding(Backend& backend) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Values bad = {kInfinity, -kInfinity, std::nanf("")};
  OnDevice device(backend);
  int32_t* const found = device.Put(std::vector<int32_t>{7, 7});
  const auto finds = [&](const Values& values, WireType type) {
    const auto count = static_cast<int64_t>(values.size());
    const void* given = device.Put(values);
    if (type != WireType::kFloat32) {
      uint16_t* const rounded = device.Put(std::vector<uint16_t>(values.size() + 1, 0x7FFF));
      REQUIRE(backend.Round(static_cast<const float*>(given), count, type, rounded).ok());
      given = rounded;
    }
    REQUIRE(backend.FindNotFinite(given, count, type, found).ok());
    const std::vector<int32_t> answers = device.Get(found, 2);
    CHECK(answers[1] == 7);
    return answers[0];
  };
  for (const WireType type : {WireType::kFloat32, WireType::kBfloat16, WireType::kFloat16}) {
    for (const size_t count : {1, 2, 3, 4, 7, 8, 9, 15, 2047, 70'001}) {
      CAPTURE(static_cast<int>(type), count);
      Values values = Random(count, 3);
      values.back() = type == WireType::kFloat16 ? 65504.0F : 3e38F;
      CHECK(finds(values, type) == 0);
      const std::set<size_t> places = {0, count / 3, count / 2, count - 1 - count / 4, count - 1};
      for (const size_t place : places) {
        const float before = std::exchange(values[place], bad[place % bad.size()]);
        CHECK(finds(values, type) == 1);
        values[place] = before;
      }
    }
    REQUIRE(backend.FindNotFinite(found, 0, type, found).ok());
    CHECK(device.Get(found, 1).front() == 0);
  }
}

// As servers of this host share their weights: what they write later is read, too.
void CheckPages(Backend& backend) {
  constexpr size_t kFloats = 10'000;  // Not whole pages.
  auto theirs = *SharedMemory::Create("weights", kFloats * sizeof(float), SharedMemory::Access::kRead);
  FileDescriptor file(dup(theirs.file().get()));
  const auto mapped = std::make_shared<const SharedMemory>(
      *SharedMemory::Attach("weights", std::move(file), theirs.bytes().size(), SharedMemory::Access::kRead));
  const auto bytes = static_cast<int64_t>(kFloats * sizeof(float));
  OnDevice device(backend);
  float* const there = device.Put(Values(kFloats));
  for (int round = 0; round < 2; ++round) {  // What was let go of can be pinned again.
    const auto pinned =
        backend.PinHostPages({mapped, reinterpret_cast<const std::byte*>(mapped->bytes().data())}, bytes);
    if (absl::IsUnimplemented(pinned.status())) PS_SKIP(pinned.status().message());
    REQUIRE(pinned.status() == absl::OkStatus());
    for (const uint32_t seed : {1, 2}) {
      const Values values = Random(kFloats, seed);
      std::memcpy(theirs.bytes().data(), values.data(), values.size() * sizeof(float));
      REQUIRE(backend.CopyToDevice(pinned->get(), there, bytes).ok());
      CHECK(device.Get(there, kFloats) == values);
    }
  }
}

TEST_CASE("CPU: values are rounded to two bytes to the bit") { CheckRound(*OnCpu()); }
TEST_CASE("CPU: what is not finite is found, wherever it is") { CheckFinding(*OnCpu()); }
TEST_CASE("CPU: memory that is mapped for reading is read as it is") { CheckPages(*OnCpu()); }
TEST_CASE("GPU: values are rounded to two bytes to the bit") { OnGpu(CheckRound); }
TEST_CASE("GPU: what is not finite is found, wherever it is") { OnGpu(CheckFinding); }
TEST_CASE("GPU: memory that is mapped for reading is pinned, and read as it is") { OnGpu(CheckPages); }

}  // namespace
}  // namespace ps
