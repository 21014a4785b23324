#include "worker/batch_source.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ps {
namespace {

class FixedShare final : public BatchSource {
 public:
  FixedShare(Sampler sampler, int64_t first, int64_t total)
      : sampler_(std::move(sampler)), total_(total), next_(first) {}

  absl::StatusOr<NextBatch> Take(bool /*wait*/) override {
    if (next_ >= total_) return NextBatch{.kind = NextBatch::Kind::kSpent};
    return NextBatch{.kind = NextBatch::Kind::kBatch, .plan = sampler_.Batch(next_++)};
  }
  void Finished(int64_t /*batches*/) override {}
  std::optional<int64_t> SkipTo(int64_t step) override {
    int64_t samples = 0;
    for (int64_t batch = next_; batch < std::min(step, total_); ++batch) samples += sampler_.SamplesOf(batch);
    next_ = step;
    return samples;
  }
  int64_t batch_size() const override { return sampler_.batch_size(); }
  int64_t batches_per_epoch() const override { return sampler_.steps_per_epoch(); }
  int64_t total_batches() const override { return total_; }
  double own_batches_per_epoch() const override { return static_cast<double>(batches_per_epoch()); }

 private:
  Sampler sampler_;
  const int64_t total_;
  int64_t next_;
};

}  // namespace

int64_t BudgetOf(int64_t steps, double epochs, int64_t batches_per_epoch) {
  if (steps > 0) return steps;
  return std::max<int64_t>(1, std::llround(epochs * static_cast<double>(batches_per_epoch)));
}

std::unique_ptr<BatchSource> MakeFixedShare(Sampler sampler, int64_t first, int64_t total) {
  return std::make_unique<FixedShare>(std::move(sampler), first, total);
}

}  // namespace ps
