// Which samples a worker's step uses. A pure function of its options: no two workers need to talk to agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/random.h"

namespace ps {

struct SamplerOptions {
  int64_t samples = 0;      // n, of the training split; at least 1.
  int32_t num_workers = 1;  // N.
  int32_t rank = 0;         // r, in [0, N).
  int64_t batch_size = 0;   // B, this worker's samples of a step. 0 means full: ceil(n / N).
  uint64_t seed = 1;
  bool shuffle = true;  // false: every epoch is in file order.
  // Unless 0, the samples are this rank's own, and `largest` are those of the rank that has the most: at least n.
  int64_t largest = 0;
};

// One step's share of one rank.
struct BatchPlan {
  int64_t epoch = 0;
  int64_t epoch_step = 0;      // In [0, steps_per_epoch()).
  int64_t global_samples = 0;  // The samples of all ranks that share them; at least 1, unless they are this rank's own.
  std::vector<int32_t> indices;  // This rank's samples. Empty if the epoch has none left for it.
};

// For each epoch one permutation of the n samples, from (seed, epoch). Global batch t of the epoch is the next N * B
// samples of it, and rank r takes the r-th run of B of them. The last, smaller batch is used. So one worker with batch
// N * B sees the same global batches as N workers with B.
//
// Where samples are a rank's own, batch t of an epoch is the next B of them (full: all, in one), in the order of a
// permutation from (seed, epoch, rank); rank 0's is the one that shared samples have. All ranks' epochs have as many
// steps, those that the rank with the most samples needs: the last ones of a rank with fewer are empty.
//
// Caches one epoch's permutation (4 bytes a sample), so steps are cheap in order and may come in any order. Not
// thread-safe; plans are values and outlive it.
class Sampler {
 public:
  // INVALID_ARGUMENT if an option is out of its range.
  static absl::StatusOr<Sampler> Create(const SamplerOptions& options);

  int64_t steps_per_epoch() const { return steps_per_epoch_; }
  int64_t batch_size() const { return batch_size_; }  // B, also where the options said full.

  // `step` counts from 0 over all epochs.
  BatchPlan Batch(int64_t step);
  // How many samples of it are this rank's.
  int64_t SamplesOf(int64_t step) const { return ShareOf(step).end - ShareOf(step).begin; }

 private:
  // Where a step's global batch starts in the epoch, how many samples it has, and which of them are this rank's.
  struct Share {
    int64_t start = 0;
    int64_t global_samples = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };

  explicit Sampler(const SamplerOptions& options);

  Share ShareOf(int64_t step) const;

  // Makes permutation_ that of `epoch`.
  void Permute(int64_t epoch);

  // Constant after construction.
  SamplerOptions options_;
  int64_t sharers_;  // Ranks that share the samples.
  int64_t batch_size_;
  int64_t global_batch_;  // B of each of them.
  int64_t steps_per_epoch_;

  int64_t permuted_epoch_ = -1;
  std::vector<int32_t> permutation_;
};

// Samples in any order, gathered into a batch.

// Rows `indices` [count] of samples [·, features] to x [count, features]; bytes become byte / 255.0f, correctly
// rounded.
void GatherRows(const uint8_t* samples, const int32_t* indices, int64_t count, int64_t features, float* x);
void GatherRows(const float* samples, const int32_t* indices, int64_t count, int64_t features, float* x);

// How the data folder draws from a job's seed (common/random.h).

// Each use of the seed draws from a stream of its own, so that no two uses see the same numbers. Epoch e, below 2^32,
// is shuffled with stream e; those from 2^33 on belong to the model's initial weights.
inline constexpr uint64_t kValidationStream = uint64_t{1} << 48;
inline constexpr uint64_t kSyntheticStream = uint64_t{2} << 48;
inline constexpr uint64_t kFunctionStream = uint64_t{3} << 48;
inline constexpr uint64_t kPaceStream = uint64_t{4} << 48;  // Plus the rank: its delays (train/pace.h).
// Times the rank, below 4096, and plus the epoch: of samples that are a rank's own.
inline constexpr uint64_t kOwnStream = uint64_t{1} << 52;

// Puts `items` in a random order, the same on every platform (Durstenfeld's form of Fisher-Yates, 1964).
template <typename T>
void PermuteInPlace(std::mt19937_64& random, std::span<T> items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[UniformBelow(random, i)]);
}

}  // namespace ps
