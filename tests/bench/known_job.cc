#include "tests/bench/known_job.h"

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/half_floats.h"
#include "common/payload.h"
#include "server/engine/reduce.h"
#include "tests/bench/bench_layout.h"
#include "worker/link/call_messages.h"

namespace ps {
namespace {

constexpr size_t kPeriod =
    7;  // The values of a model's elements repeat after so many, in layout order. It divides no alignment.

// Neighbours differ, and so do ranks: a value in another's place is noticed. It is a power of two, so that every
// product with it is exact, and the expected weights are so to the last bit.
float GradientAt(uint32_t rank, size_t element) {
  return std::ldexp(1.0F, -static_cast<int>((element + rank) % kPeriod));
}

float InitialAt(size_t element) { return 1 + GradientAt(0, element); }

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

KnownWeights::KnownWeights(const Layout& layout, uint32_t workers, const WireFormat& format, uint32_t in_a_version,
                           PushContribution pushed)
    : plan_(layout, 1),
      workers_(workers),
      in_a_version_(in_a_version),
      format_(format),
      rate_(pushed == PushContribution::kGradient ? -kKnownRate : kKnownRate) {
  size_t elements = 0;
  for (const TensorSpec& tensor : layout) {
    begins_.push_back(elements);
    elements += static_cast<size_t>(tensor.elements());
  }
  // Two bytes hold the gradients as they are.
  const bool exact = format_.pushes.top_k == 0 && format_.pushes.type != WireType::kE3m0;
  if (exact) elements = kPeriod;
  for (size_t i = 0; i < elements; ++i) expected_.push_back(InitialAt(i));
  if (exact) return;
  for (uint32_t rank = 0; rank < workers_; ++rank) {
    Rank& made = ranks_.emplace_back();
    for (size_t i = 0; i < elements; ++i) made.gradient.push_back(GradientAt(rank, i));
    made.sent = *SharedTensors::CreateOwn(layout, format_.pushes);
    if (format_.error_feedback) made.residuals = std::make_unique<Residuals>(plan_, false);
  }
}

// The plain formula in float32, in rank order.
void KnownWeights::AdvanceTo(uint64_t steps) {
  for (; steps_ < steps; ++steps_) {
    if (ranks_.empty()) {
      for (size_t i = 0; i < kPeriod; ++i) {
        float mean = 0;
        for (uint32_t rank = 0; rank < workers_; ++rank) mean += Coefficient(1, in_a_version_) * GradientAt(rank, i);
        expected_[i] += rate_ * mean;
      }
      continue;
    }
    for (const SliceInfo& info : plan_.slices()) {
      std::vector<float> sum(static_cast<size_t>(info.elements), 0.0F);
      for (Rank& rank : ranks_) AddSlice(info, rank, sum);
      float* const weights = expected_.data() + begins_[info.tensor] + info.offset;
      for (size_t i = 0; i < sum.size(); ++i) weights[i] += rate_ * sum[i];
    }
    for (Rank& rank : ranks_) {
      if (rank.residuals != nullptr) rank.residuals->Commit(0, steps_, plan_.shard_slices(0));
    }
  }
}

void KnownWeights::AddSlice(const SliceInfo& info, Rank& rank, std::vector<float>& sum) const {
  const float* const gradient = rank.gradient.data() + begins_[info.tensor] + info.offset;
  ps::Check(EncodeSlice(gradient, info, *rank.sent, rank.residuals.get(), 0, 1), "the gradients are finite");
  const ModelMemory::Place place = rank.sent->model().slice(info);
  const Piece bytes = Piece(rank.sent->bytes()).subspan(place.begin, place.positions + place.values);
  Payload payload({bytes.subspan(place.positions)}, nullptr);
  payload.set_type(place.type);
  if (payload.is_packed()) ps::Check(payload.Unpack().ok(), "what was encoded is whole");
  std::vector<float> values(payload.bytes() / WireBytes(payload.type()));
  payload.CopyFloatsTo(values.data());
  std::vector<uint16_t> positions(place.positions / sizeof(uint16_t));
  std::memcpy(positions.data(), bytes.data(), place.positions);
  const auto sent = static_cast<size_t>(rank.sent->model().weights().Sent(info.elements));
  for (size_t i = 0; i < sent; ++i) {
    sum[place.sparse() ? positions[i] : i] += Coefficient(1, in_a_version_) * values[i];
  }
}

float KnownWeights::ExpectedAt(size_t element) const {
  const float expected = expected_[ranks_.empty() ? element % kPeriod : element];
  float rounded = expected;
  if (format_.weights != WireType::kFloat32) RoundThrough(&expected, 1, format_.weights, &rounded, Isa::kPortable);
  return rounded;
}

absl::Status KnownWeights::Check(const ConstTensors& weights, uint64_t steps) {
  AdvanceTo(steps);
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    for (size_t i = 0; i < weights[tensor].size(); ++i) {
      const float expected = ExpectedAt(begins_[tensor] + i);
      if (weights[tensor][i] == expected) continue;
      return absl::InternalError(absl::StrCat("weight ", i, " of tensor ", tensor, " is ", weights[tensor][i],
                                              " after ", steps, " steps, expected ", expected));
    }
  }
  return absl::OkStatus();
}

}  // namespace ps
