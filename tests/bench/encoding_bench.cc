#include "tests/bench/encoding_bench.h"

#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/half_floats.h"
#include "common/slices.h"
#include "worker/link/top_k.h"

namespace ps {
namespace {

std::vector<float> RandomFloats(size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.01F);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace

std::vector<Measurement> RunEncodingBench(int64_t bytes, int repeats) {
  const auto size = static_cast<double>(bytes);
  const std::vector<float> values = RandomFloats(static_cast<size_t>(bytes) / sizeof(float));
  const size_t count = values.size();
  std::vector<float> to(count);
  std::vector<float> left(count);
  std::vector<uint8_t> rounded(2 * count);
  std::vector<uint16_t> positions(328);
  std::vector<std::string> names = {"a copy"};
  std::vector<std::function<void()>> works = {[&] { std::memcpy(to.data(), values.data(), count * sizeof(float)); }};
  const auto add = [&](const std::string& name, std::function<void()> work) {
    names.push_back(name);
    works.push_back(std::move(work));
  };
  const Isa isa = BestIsa();
  for (const WireType type : {WireType::kBfloat16, WireType::kFloat16}) {
    const std::string name = absl::StrCat(ToString(type), ", ");
    add(name + "rounding", [&, type] { (void)RoundHalf(values.data(), count, type, rounded.data(), isa); });
    add(name + "rounding, keeping what is left", [&, type] {
      (void)RoundHalfKeeping(values.data(), left.data(), count, type, rounded.data(), left.data(), isa);
    });
    add(name + "widening", [&, type] { WidenHalf(rounded.data(), count, type, to.data(), isa); });
  }
  add("the largest hundredth of each slice", [&] {
    for (size_t begin = 0; begin + kSliceElements <= count; begin += kSliceElements) {
      SelectLargest(std::span(values).subspan(begin, kSliceElements), positions);
    }
  });
  std::vector<Measurement> rows = MeasureInTurn(repeats, size, works);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].name = names[i];
  return rows;
}

}  // namespace ps
