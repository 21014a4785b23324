#include "worker/train/batches.h"

#include <algorithm>
#include <cmath>

#include <spdlog/spdlog.h>
#include "common/clock.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kIndexBytes = sizeof(int32_t);
static_assert(sizeof(float) == sizeof(int32_t), "labels and targets share their memory");

// So much of a device's memory is left for what libraries load and allocate as they go, and for other workers.
constexpr int64_t kReserveBytes = int64_t{1} << 30;

int32_t* Integers(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.get()); }

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

absl::StatusOr<std::unique_ptr<Batches>> Batches::Create(const Dataset& dataset, Backend& backend, int64_t max_batch) {
  std::unique_ptr<Batches> batches(new Batches(dataset, backend, max_batch));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * dataset.features() * kFloatBytes, batches->x_, nullptr));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * kIndexBytes, batches->labels_, nullptr));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * kIndexBytes, batches->indices_, &batches->host_indices_));
  return batches;
}

absl::Status Batches::Allocate(int64_t bytes, Memory& device, Memory* host) {
  PS_ASSIGN_OR_RETURN(device, backend_.AllocateDevice(bytes));
  if (host == nullptr) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(*host, backend_.unified() ? device : backend_.AllocateHost(bytes));
  return absl::OkStatus();
}

absl::Status Batches::KeepSamples() {
  const bool is_bytes = !dataset_.bytes().empty();
  const void* samples = is_bytes ? static_cast<const void*>(dataset_.bytes().data()) : dataset_.floats().data();
  const void* labels = regression() ? static_cast<const void*>(dataset_.targets().data()) : dataset_.labels().data();
  if (!backend_.unified()) {
    const auto sample_bytes = static_cast<int64_t>(dataset_.bytes().size() + dataset_.floats().size_bytes());
    const auto label_bytes = dataset_.size() * kIndexBytes;
    PS_ASSIGN_OR_RETURN(const int64_t free, backend_.FreeDeviceBytes());
    if (sample_bytes + label_bytes > free - kReserveBytes) {
      PS_ASSIGN_OR_RETURN(host_x_, backend_.AllocateHost(max_batch_ * dataset_.features() * kFloatBytes));
      PS_ASSIGN_OR_RETURN(host_labels_, backend_.AllocateHost(max_batch_ * kIndexBytes));
      spdlog::info("{} do not fit into the device's memory: the host gathers each batch", ToString(dataset_));
      return absl::OkStatus();
    }
    PS_RETURN_IF_ERROR(Allocate(sample_bytes, kept_samples_, nullptr));
    PS_RETURN_IF_ERROR(Allocate(label_bytes, kept_labels_, nullptr));
    PS_RETURN_IF_ERROR(backend_.CopyToDevice(samples, kept_samples_.get(), sample_bytes));
    PS_RETURN_IF_ERROR(backend_.CopyToDevice(labels, kept_labels_.get(), label_bytes));
    PS_RETURN_IF_ERROR(backend_.Synchronize());
    samples = kept_samples_.get();
    labels = kept_labels_.get();
  }
  if (is_bytes) {
    bytes_ = static_cast<const uint8_t*>(samples);
  } else {
    floats_ = static_cast<const float*>(samples);
  }
  all_labels_ = labels;
  return absl::OkStatus();
}

absl::StatusOr<Batch> Batches::Load(std::span<const int32_t> indices) {
  PS_RETURN_IF_ERROR(resident() ? GatherOnDevice(indices) : GatherOnHost(indices));
  return Batch{.x = Floats(x_),
               .labels = regression() ? nullptr : Integers(labels_),
               .targets = regression() ? Floats(labels_) : nullptr,
               .size = static_cast<int64_t>(indices.size())};
}

absl::Status Batches::GatherOnDevice(std::span<const int32_t> indices) {
  const auto count = static_cast<int64_t>(indices.size());
  std::copy(indices.begin(), indices.end(), Integers(host_indices_));
  PS_RETURN_IF_ERROR(backend_.CopyToDevice(host_indices_.get(), indices_.get(), count * kIndexBytes));
  const int32_t* rows = Integers(indices_);
  PS_RETURN_IF_ERROR(bytes_ != nullptr ? backend_.Gather(bytes_, rows, count, dataset_.features(), Floats(x_))
                                       : backend_.Gather(floats_, rows, count, dataset_.features(), Floats(x_)));
  if (regression()) return backend_.Gather(static_cast<const float*>(all_labels_), rows, count, 1, Floats(labels_));
  return backend_.Gather(static_cast<const int32_t*>(all_labels_), rows, count, Integers(labels_));
}

absl::Status Batches::GatherOnHost(std::span<const int32_t> indices) {
  const auto count = static_cast<int64_t>(indices.size());
  dataset_.Gather(indices, Floats(host_x_), regression() ? nullptr : Integers(host_labels_));
  if (regression()) dataset_.GatherTargets(indices, Floats(host_labels_));
  PS_RETURN_IF_ERROR(backend_.CopyToDevice(host_x_.get(), x_.get(), count * dataset_.features() * kFloatBytes));
  return backend_.CopyToDevice(host_labels_.get(), labels_.get(), count * kIndexBytes);
}

int64_t BudgetOf(int64_t steps, double epochs, int64_t batches_per_epoch) {
  if (steps > 0) return steps;
  return std::max<int64_t>(1, std::llround(epochs * static_cast<double>(batches_per_epoch)));
}

std::unique_ptr<BatchSource> MakeFixedShare(Sampler sampler, int64_t first, int64_t total) {
  return std::make_unique<FixedShare>(std::move(sampler), first, total);
}

absl::Status BatchFeed::Take(bool wait) {
  if (next_.has_value() && (next_->kind != NextBatch::Kind::kNotYet || !wait)) return absl::OkStatus();
  const TimePoint began = Now();
  PS_ASSIGN_OR_RETURN(next_, source_.Take(wait));
  if (next_->kind == NextBatch::Kind::kBatch) ++taken_;
  loading_s_ += Seconds(Now() - began);
  return absl::OkStatus();
}

absl::Status BatchFeed::Load() {
  if (is_loaded_ || next_->kind != NextBatch::Kind::kBatch) return absl::OkStatus();
  const TimePoint began = Now();
  const BatchPlan& plan = next_->plan;
  PS_ASSIGN_OR_RETURN(const Batch data, batches_.Load(plan.indices));
  loading_s_ += Seconds(Now() - began);
  loaded_ = {.data = data,
             .samples = static_cast<uint32_t>(plan.indices.size()),
             .place = source_.PlaceOf(plan),
             .taken = taken_,
             .runs = source_.taken_runs()};
  is_loaded_ = true;
  return absl::OkStatus();
}

absl::StatusOr<NextBatch::Kind> BatchFeed::Peek() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/false));
  return next_->kind;
}

absl::Status BatchFeed::Prefetch() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/false));
  return Load();
}

absl::StatusOr<std::optional<TrainingBatch>> BatchFeed::Next() {
  PS_RETURN_IF_ERROR(Take(/*wait=*/true));
  if (next_->kind == NextBatch::Kind::kSpent) return std::nullopt;
  PS_RETURN_IF_ERROR(Load());
  next_.reset();
  is_loaded_ = false;
  loaded_.loading_s = std::exchange(loading_s_, 0.0);
  return loaded_;
}

int64_t BatchFeed::next_place() const {
  const bool follows = next_.has_value() && next_->kind == NextBatch::Kind::kBatch;
  return follows ? source_.PlaceOf(next_->plan) : source_.total_batches();
}

void BatchFeed::SkipTo(uint64_t step) {
  const std::optional<int64_t> jumped_over = source_.SkipTo(static_cast<int64_t>(step));
  if (!jumped_over.has_value()) return;
  jumped_over_ += *jumped_over;
  if (next_.has_value()) jumped_over_ += static_cast<int64_t>(next_->plan.indices.size());
  next_.reset();
  is_loaded_ = false;
}

}  // namespace ps
