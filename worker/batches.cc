#include "worker/batches.h"

#include <algorithm>

#include <spdlog/spdlog.h>
#include "common/status.h"

namespace ps {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kIndexBytes = sizeof(int32_t);
static_assert(sizeof(float) == sizeof(int32_t), "labels and targets share their memory");

// Of a device's memory: for what libraries load and allocate as they go, and for other workers.
constexpr int64_t kReserveBytes = int64_t{1} << 30;

int32_t* Integers(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.get()); }

}  // namespace

absl::StatusOr<std::unique_ptr<Batches>> Batches::Create(const Dataset& dataset, Backend& backend, int64_t max_batch) {
  std::unique_ptr<Batches> batches(new Batches(dataset, backend, max_batch));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * dataset.features() * kFloatBytes, batches->x_, nullptr));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * kIndexBytes, batches->labels_, nullptr));
  PS_RETURN_IF_ERROR(batches->Allocate(max_batch * kIndexBytes, batches->indices_, &batches->host_indices_));
  return batches;
}

absl::Status Batches::Allocate(int64_t bytes, Memory& device, Memory* host) {
  absl::StatusOr<Memory> memory = backend_.AllocateDevice(bytes);
  if (!memory.ok()) return memory.status();
  device = *std::move(memory);
  if (host == nullptr) return absl::OkStatus();
  memory = backend_.unified() ? device : backend_.AllocateHost(bytes);
  if (!memory.ok()) return memory.status();
  *host = *std::move(memory);
  return absl::OkStatus();
}

absl::Status Batches::KeepSamples() {
  const bool is_bytes = !dataset_.bytes().empty();
  const void* samples = is_bytes ? static_cast<const void*>(dataset_.bytes().data()) : dataset_.floats().data();
  const void* labels = regression() ? static_cast<const void*>(dataset_.targets().data()) : dataset_.labels().data();
  if (!backend_.unified()) {
    const auto sample_bytes = static_cast<int64_t>(dataset_.bytes().size() + dataset_.floats().size_bytes());
    const auto label_bytes = dataset_.size() * kIndexBytes;
    const absl::StatusOr<int64_t> free = backend_.FreeDeviceBytes();
    if (!free.ok()) return free.status();
    if (sample_bytes + label_bytes > *free - kReserveBytes) {
      const absl::StatusOr<Memory> x = backend_.AllocateHost(max_batch_ * dataset_.features() * kFloatBytes);
      const absl::StatusOr<Memory> of = backend_.AllocateHost(max_batch_ * kIndexBytes);
      for (const absl::Status& status : {x.status(), of.status()}) PS_RETURN_IF_ERROR(status);
      host_x_ = *x;
      host_labels_ = *of;
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
  if (regression()) {
    return backend_.Gather(static_cast<const float*>(all_labels_), rows, count, 1, Floats(labels_));
  }
  return backend_.Gather(static_cast<const int32_t*>(all_labels_), rows, count, Integers(labels_));
}

absl::Status Batches::GatherOnHost(std::span<const int32_t> indices) {
  const auto count = static_cast<int64_t>(indices.size());
  dataset_.Gather(indices, Floats(host_x_), regression() ? nullptr : Integers(host_labels_));
  if (regression()) dataset_.GatherTargets(indices, Floats(host_labels_));
  PS_RETURN_IF_ERROR(backend_.CopyToDevice(host_x_.get(), x_.get(), count * dataset_.features() * kFloatBytes));
  return backend_.CopyToDevice(host_labels_.get(), labels_.get(), count * kIndexBytes);
}

}  // namespace ps
