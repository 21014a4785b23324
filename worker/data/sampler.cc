#include "worker/data/sampler.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/status/status.h"
#include "common/simd.h"
#include "common/status.h"
#include "worker/data/dataset.h"

namespace ps {
namespace {

int64_t DivideUp(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// x / 255 without a division: 1/255 = kHigh + kLow, and x * kHigh is exact for a byte x, so only the last addition
// rounds by more than 2^-40 relative. dataset_test compares all 256 values with the division.
constexpr float kHigh = 0x1.01p-8F;
constexpr float kLow = 0x1.010102p-24F;

// So much of the next row is prefetched; in a longer row the processor sees the pattern by itself.
constexpr int64_t kPrefetchBytes = 2048;

struct GatherBytesKernel {
  PS_KERNEL void Run(const uint8_t* base, const int32_t* indices, int64_t count, int64_t features,
                     float* __restrict out) {
    for (int64_t k = 0; k < count; ++k, out += features) {
      const uint8_t* row = base + indices[k] * features;
      // Rows come in random order, so the processor cannot guess where the next one starts.
      const uint8_t* next = base + indices[k + 1 < count ? k + 1 : k] * features;
      for (int64_t byte = 0; byte < std::min(features, kPrefetchBytes); byte += 64) __builtin_prefetch(next + byte);
      for (int64_t i = 0; i < features; ++i) {
        const float value = row[i];
        out[i] = value * kHigh + value * kLow;
      }
    }
  }
};

}  // namespace

absl::StatusOr<Sampler> Sampler::Create(const SamplerOptions& options) {
  if (options.samples < 1 || options.samples > kSamplesMax) {
    return InvalidArgument("the training split has ", options.samples, " samples; expected 1 to ", kSamplesMax);
  }
  if (options.num_workers < 1) return InvalidArgument("num_workers is ", options.num_workers, "; expected at least 1");
  if (options.rank < 0 || options.rank >= options.num_workers) {
    return InvalidArgument("rank is ", options.rank, "; expected 0 to ", options.num_workers - 1);
  }
  if (options.batch_size < 0 || options.batch_size > kSamplesMax) {
    return InvalidArgument("batch_size is ", options.batch_size, "; expected 0 (full) to ", kSamplesMax);
  }
  if (options.largest != 0 && (options.largest < options.samples || options.largest > kSamplesMax)) {
    return InvalidArgument("the worker with the most samples has ", options.largest, "; expected ", options.samples,
                           " to ", kSamplesMax);
  }
  return Sampler(options);
}

Sampler::Sampler(const SamplerOptions& options)
    : options_(options),
      sharers_(options.largest > 0 ? 1 : options.num_workers),
      batch_size_(options.batch_size > 0 ? options.batch_size : DivideUp(options.samples, sharers_)),
      global_batch_(sharers_ * batch_size_),
      steps_per_epoch_(options.largest > 0 && options.batch_size > 0 ? DivideUp(options.largest, global_batch_)
                                                                     : DivideUp(options.samples, global_batch_)) {}

void Sampler::Permute(int64_t epoch) {
  // The permutation of an epoch must not depend on the epochs before it, so it starts from file order each time.
  permutation_.resize(static_cast<size_t>(options_.samples));
  std::iota(permutation_.begin(), permutation_.end(), 0);
  const uint64_t of_rank = options_.largest > 0 ? kOwnStream * static_cast<uint64_t>(options_.rank) : 0;
  std::mt19937_64 random = MakeRandom(options_.seed, of_rank + static_cast<uint64_t>(epoch));
  PermuteInPlace(random, std::span(permutation_));
  permuted_epoch_ = epoch;
}

Sampler::Share Sampler::ShareOf(int64_t step) const {
  Share share;
  share.start = step % steps_per_epoch_ * global_batch_;
  share.global_samples = std::clamp<int64_t>(options_.samples - share.start, 0, global_batch_);
  share.begin = options_.largest > 0 ? 0 : std::min(options_.rank * batch_size_, share.global_samples);
  share.end = std::min(share.begin + batch_size_, share.global_samples);
  return share;
}

BatchPlan Sampler::Batch(int64_t step) {
  const auto [start, global_samples, begin, end] = ShareOf(step);
  BatchPlan plan;
  plan.epoch = step / steps_per_epoch_;
  plan.epoch_step = step % steps_per_epoch_;
  plan.global_samples = global_samples;
  plan.indices.resize(static_cast<size_t>(end - begin));
  if (!options_.shuffle) {
    std::iota(plan.indices.begin(), plan.indices.end(), static_cast<int32_t>(start + begin));
    return plan;
  }
  if (plan.indices.empty()) return plan;
  if (plan.epoch != permuted_epoch_) Permute(plan.epoch);
  std::copy_n(permutation_.begin() + start + begin, end - begin, plan.indices.begin());
  return plan;
}

void GatherRows(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x) {
  RunKernel<GatherBytesKernel>(BestIsa(), samples, indices, count, features, x);
}

void GatherRows(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x) {
  for (int64_t k = 0; k < count; ++k) {
    std::memcpy(x + k * features, samples + indices[k] * features, static_cast<size_t>(features) * sizeof(float));
  }
}

}  // namespace ps
