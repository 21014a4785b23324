#include "tests/bench/known_job.h"

#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/bench_layout.h"

namespace ps {
namespace {

constexpr size_t kPeriod = 7;  // Of the values of a model's elements, in layout order. No divisor of any alignment.

// Neighbours differ, and so do ranks: a value in another's place is noticed. It is a power of two, so that every
// product with it is exact, and the expected weights are so to the last bit.
float GradientAt(uint32_t rank, size_t element) {
  return std::ldexp(1.0F, -static_cast<int>((element + rank) % kPeriod));
}

float InitialAt(size_t element) { return 1 + GradientAt(0, element); }

// The plain formula in float32, in rank order.
float ExpectedAt(size_t element, uint32_t workers, uint64_t steps) {
  const auto coefficient = static_cast<float>(1.0 / static_cast<double>(workers));
  float mean = 0;
  for (uint32_t rank = 0; rank < workers; ++rank) mean += coefficient * GradientAt(rank, element);
  float weight = InitialAt(element);
  for (uint64_t step = 0; step < steps; ++step) weight -= kKnownLearningRate * mean;
  return weight;
}

template <typename ValueAt>
void Fill(const MutableTensors& tensors, ValueAt value_at) {
  size_t element = 0;
  for (const std::span<float> tensor : tensors) {
    for (float& value : tensor) value = value_at(element++);
  }
}

}  // namespace

absl::Status StartKnownJob(Client& client, const Layout& layout, const MutableTensors& weights) {
  std::vector<float> values(static_cast<size_t>(ModelBytes(layout)) / sizeof(float));
  MutableTensors initial;
  initial.reserve(layout.size());
  size_t next = 0;
  for (const TensorSpec& tensor : layout) {
    const auto elements = static_cast<size_t>(tensor.elements());
    initial.push_back(std::span(values).subspan(next, elements));
    next += elements;
  }
  Fill(initial, InitialAt);
  return client.Start({initial.begin(), initial.end()}, weights).status();
}

void FillKnownGradients(uint32_t rank, const MutableTensors& gradients) {
  Fill(gradients, [&](size_t element) { return GradientAt(rank, element); });
}

absl::Status CheckKnownWeights(const ConstTensors& weights, uint32_t workers, uint64_t steps) {
  std::array<float, kPeriod> expected;
  for (size_t i = 0; i < kPeriod; ++i) expected[i] = ExpectedAt(i, workers, steps);
  size_t element = 0;  // Of the model.
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    for (size_t i = 0; i < weights[tensor].size(); ++i, ++element) {
      const float weight = weights[tensor][i];
      if (weight == expected[element % kPeriod]) continue;
      return absl::InternalError(absl::StrCat("weight ", i, " of tensor ", tensor, " is ", weight, " after ", steps,
                                              " steps, expected ", expected[element % kPeriod]));
    }
  }
  return absl::OkStatus();
}

}  // namespace ps
