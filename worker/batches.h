// A data set's samples, brought to where the network computes.
#pragma once

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
  // max_batch ≥ 1: the largest that is loaded.
  static absl::StatusOr<std::unique_ptr<Batches>> Create(const Dataset& dataset, Backend& backend, int64_t max_batch);
  // Waits for what is under way.
  ~Batches() { (void)backend_.Synchronize(); }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Call it once, after all other device memory is allocated. If the samples fit into the free memory, minus a reserve,
  // they are kept there as they are stored, and gathered by the device; else each batch is gathered by the host, which
  // the log says.
  absl::Status KeepSamples();

  const Dataset& dataset() const { return dataset_; }
  // The device has the samples.
  bool resident() const { return bytes_ != nullptr || floats_ != nullptr; }

  // Queues the samples `indices`, each in [0, dataset().size()), to the memory of the previous batch, whose step must
  // have ended.
  absl::StatusOr<Batch> Load(std::span<const int32_t> indices);

 private:
  Batches(const Dataset& dataset, Backend& backend, int64_t max_batch)
      : dataset_(dataset), backend_(backend), max_batch_(max_batch) {}
  bool regression() const { return dataset_.classes() == 0; }
  absl::Status Allocate(int64_t bytes, Memory& device, Memory* host);
  absl::Status GatherOnDevice(std::span<const int32_t> indices);
  absl::Status GatherOnHost(std::span<const int32_t> indices);

  const Dataset dataset_;
  Backend& backend_;
  const int64_t max_batch_;
  Memory x_;
  Memory labels_;  // For regression the targets, here and below: both have four bytes a sample.
  Memory indices_;
  // The host's: the same as the above where memory is unified, null where they are not needed.
  Memory host_x_;
  Memory host_labels_;
  Memory host_indices_;
  // What the device has of the samples; the data set's own memory where memory is unified.
  Memory kept_samples_;
  Memory kept_labels_;
  const uint8_t* bytes_ = nullptr;
  const float* floats_ = nullptr;
  const void* all_labels_ = nullptr;
};

}  // namespace ps
