#include "worker/batches.h"

#include <algorithm>

#include "common/status.h"

namespace ps {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kIndexBytes = sizeof(int32_t);

int32_t* Integers(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.get()); }

}  // namespace

absl::StatusOr<std::unique_ptr<Batches>> Batches::Create(const Dataset& dataset, Backend& backend, int64_t max_batch) {
  std::unique_ptr<Batches> batches(new Batches(dataset, backend));
  PS_RETURN_IF_ERROR(batches->AllocatePlaces(max_batch));
  PS_RETURN_IF_ERROR(batches->KeepSamples());
  return batches;
}

absl::Status Batches::AllocatePlaces(int64_t max_batch) {
  absl::Status status = absl::OkStatus();
  const auto allocate = [&](int64_t bytes, Memory& device, Memory& host) {
    absl::StatusOr<Memory> memory = backend_.AllocateDevice(bytes);
    if (memory.ok()) device = host = *memory;
    if (memory.ok() && !backend_.unified()) {
      memory = backend_.AllocateHost(bytes);
      if (memory.ok()) host = *memory;
    }
    status.Update(memory.status());
  };
  for (Place& place : places_) {
    allocate(max_batch * dataset_.features() * kFloatBytes, place.x, place.host_x);
    allocate(max_batch * kIndexBytes, place.labels, place.host_labels);
    allocate(max_batch * kIndexBytes, place.indices, place.host_indices);
  }
  return status;
}

absl::Status Batches::KeepSamples() {
  const bool is_bytes = !dataset_.bytes().empty();
  const void* samples = is_bytes ? static_cast<const void*>(dataset_.bytes().data()) : dataset_.floats().data();
  const void* labels = dataset_.labels().data();
  if (!backend_.unified()) {
    const auto sample_bytes = static_cast<int64_t>(dataset_.bytes().size() + dataset_.floats().size_bytes());
    const auto label_bytes = static_cast<int64_t>(dataset_.labels().size_bytes());
    absl::StatusOr<Memory> kept_samples = backend_.AllocateDevice(sample_bytes);
    absl::StatusOr<Memory> kept_labels = backend_.AllocateDevice(label_bytes);
    for (const absl::Status& status : {kept_samples.status(), kept_labels.status()}) {
      if (absl::IsResourceExhausted(status)) return absl::OkStatus();
      PS_RETURN_IF_ERROR(status);
    }
    kept_samples_ = *std::move(kept_samples);
    kept_labels_ = *std::move(kept_labels);
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
  labels_ = static_cast<const int32_t*>(labels);
  return absl::OkStatus();
}

absl::StatusOr<Batch> Batches::Load(std::span<const int32_t> indices) {
  const Place& place = places_[next_];
  next_ = 1 - next_;
  PS_RETURN_IF_ERROR(resident() ? GatherOnDevice(place, indices) : GatherOnHost(place, indices));
  return Batch{.x = Floats(place.x), .labels = Integers(place.labels), .size = static_cast<int64_t>(indices.size())};
}

absl::Status Batches::GatherOnDevice(const Place& place, std::span<const int32_t> indices) {
  const auto count = static_cast<int64_t>(indices.size());
  std::copy(indices.begin(), indices.end(), Integers(place.host_indices));
  PS_RETURN_IF_ERROR(backend_.CopyToDevice(place.host_indices.get(), place.indices.get(), count * kIndexBytes));
  const int32_t* rows = Integers(place.indices);
  PS_RETURN_IF_ERROR(bytes_ != nullptr ? backend_.Gather(bytes_, rows, count, dataset_.features(), Floats(place.x))
                                       : backend_.Gather(floats_, rows, count, dataset_.features(), Floats(place.x)));
  return backend_.Gather(labels_, rows, count, Integers(place.labels));
}

absl::Status Batches::GatherOnHost(const Place& place, std::span<const int32_t> indices) {
  const auto count = static_cast<int64_t>(indices.size());
  dataset_.Gather(indices, Floats(place.host_x), Integers(place.host_labels));
  PS_RETURN_IF_ERROR(
      backend_.CopyToDevice(place.host_x.get(), place.x.get(), count * dataset_.features() * kFloatBytes));
  return backend_.CopyToDevice(place.host_labels.get(), place.labels.get(), count * kIndexBytes);
}

}  // namespace ps
