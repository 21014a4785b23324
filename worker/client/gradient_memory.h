// A client's memory for gradients that servers of its host read where they lie.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/sync.h"
#include "ps/client.h"
#include "ps/tensor.h"
#include "worker/client/exchange_request.h"
#include "worker/link/tensor_memory.h"

namespace ps {

// Thread-safe.
class GradientMemory {
 public:
  // The layout must outlive it.
  explicit GradientMemory(const Layout& layout) : layout_(layout) {}

  // Whether there is memory that can be shared: makes a piece, which is used later.
  absl::Status MakeSpare();
  // The buffers that the caller computes gradients into: shared memory, if `shared` and there is some, else other.
  // Later calls return the same.
  absl::StatusOr<TensorMemory> Buffers(bool shared);
  // Sets where servers of this host find what the request sends: where it lies, or a piece that it is copied to.
  void Share(ExchangeRequest& request);
  // Memory for gradients that the caller rounds to this format, which sends all elements. Later calls return the same.
  absl::StatusOr<RoundedMemory> Rounded(const PushFormat& format, bool shared);
  // Sets where what the request sends is written as such pushes carry it, where that is not as float32; `shared`: a
  // piece that servers of this host may read, unless the caller keeps many exchanges. Of a push that says that its
  // caller has rounded it: where it lies, or a piece that it is copied to. RESOURCE_EXHAUSTED if there is no memory for
  // one.
  absl::Status Encode(ExchangeRequest& request, const PushFormat& format, bool shared);

 private:
  // One of staging_ that nobody uses; null: there is none.
  std::shared_ptr<SharedTensors> FreeStaging() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<SharedTensors>> Make() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<SharedTensors>> MakeEncoded(const PushFormat& format, bool shared) const;

  const Layout& layout_;
  Mutex mutex_;
  std::optional<TensorMemory> buffers_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SharedTensors> shared_ ABSL_GUARDED_BY(mutex_);  // What they are in, if they are shared.
  std::shared_ptr<SharedTensors> rounded_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SharedTensors> spare_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<SharedTensors>> staging_ ABSL_GUARDED_BY(mutex_);  // For gradients that are not.
};

}  // namespace ps
