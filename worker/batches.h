// A data set's samples, brought to where the network computes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "worker/data/dataset.h"
#include "worker/model/backend.h"
#include "worker/model/network.h"

namespace ps {

// Used by the backend's thread; the backend must outlive it.
class Batches {
 public:
  // Where the samples fit into the device's memory they are kept there, as they are stored, and gathered by the device;
  // else each batch is gathered by the host. max_batch ≥ 1: the largest that is loaded.
  static absl::StatusOr<std::unique_ptr<Batches>> Create(const Dataset& dataset, Backend& backend, int64_t max_batch);

  const Dataset& dataset() const { return dataset_; }
  // The device has the samples.
  bool resident() const { return bytes_ != nullptr || floats_ != nullptr; }

  // Queues the samples `indices`, each in [0, dataset().size()). There are two places for batches: the one of the batch
  // before the last is used again, so its step must have ended.
  absl::StatusOr<Batch> Load(std::span<const int32_t> indices);

 private:
  struct Place {
    Memory x;
    Memory labels;
    Memory indices;
    Memory host_x;  // The host's are the same as the above where memory is unified.
    Memory host_labels;
    Memory host_indices;
  };
  Batches(const Dataset& dataset, Backend& backend) : dataset_(dataset), backend_(backend) {}
  absl::Status KeepSamples();
  absl::Status AllocatePlaces(int64_t max_batch);
  absl::Status GatherOnDevice(const Place& place, std::span<const int32_t> indices);
  absl::Status GatherOnHost(const Place& place, std::span<const int32_t> indices);

  const Dataset dataset_;
  Backend& backend_;
  // What the device has of the samples; the data set's own memory where memory is unified.
  Memory kept_samples_;
  Memory kept_labels_;
  const uint8_t* bytes_ = nullptr;
  const float* floats_ = nullptr;
  const int32_t* labels_ = nullptr;
  std::array<Place, 2> places_;
  size_t next_ = 0;
};

}  // namespace ps
