// One shard's part of a model: which slices, and where each lies in the shard's buffers. Immutable, made when the
// layout is known; shared by all who read or write the shard's memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/payload.h"
#include "common/slices.h"
#include "common/wire_type.h"

namespace ps {

class ShardLayout {
 public:
  // The layout must be valid (ValidateLayout), and shard less than num_shards. `pushes`: how they carry weights.
  ShardLayout(Layout model, uint32_t shard, uint32_t num_shards, const PushFormat& pushes = {});

  uint32_t shard() const { return shard_; }
  const SlicePlan& plan() const { return plan_; }  // It has the whole model.

  // Slices of this shard. They go by their local index, 0 to slices() - 1, in the order of the model.
  size_t slices() const { return plan_.shard_slices(shard_).size(); }
  const SliceInfo& slice(size_t local) const { return plan_.slices()[plan_.shard_slices(shard_)[local]]; }
  const TensorSpec& tensor(size_t local) const { return plan_.layout()[slice(local).tensor]; }

  // How pushes carry weights.
  const PushFormat& pushes() const { return pushes_; }
  // Whether pushes carry the slice; how many they carry, and the bytes that a server keeps of them.
  bool is_pushed(size_t local) const { return IsPushed(tensor(local).kind); }
  size_t pushed_slices() const { return plan_.pushed_shard_slices(shard_).size(); }
  uint64_t pushed_bytes() const { return pushed_bytes_; }
  // The bytes of one slice that they carry.
  uint64_t pushed_bytes(size_t local) const;

  // Floats of all slices, and of a buffer that holds them (each slice is padded).
  size_t elements() const { return static_cast<size_t>(plan_.shard_elements(shard_)); }
  size_t buffer_elements() const { return static_cast<size_t>(plan_.shard_buffer_elements(shard_)); }
  // A whole version has so many bytes.
  uint64_t bytes() const { return elements() * sizeof(float); }

  // The local index of the slice with this number in the model. INVALID_ARGUMENT if it is none of this shard's.
  absl::StatusOr<size_t> LocalIndexOf(uint32_t index) const;
  // The same of a slice that was received as an initial value, or in a push, where it may be absent and then has
  // no size. INVALID_ARGUMENT, naming slice and tensor, if it is none of this shard's, or has the wrong type or size.
  enum class Of { kInitial, kPush };
  absl::StatusOr<size_t> LocalIndex(const ReceivedSlice& received, Of of) const;

 private:
  const SlicePlan plan_;
  const uint32_t shard_;
  const PushFormat pushes_;
  uint64_t pushed_bytes_ = 0;
  std::vector<int32_t> local_;  // Each of the model's slices has one; -1: it is another shard's.
};

// Each tensor's sum, from those of the model's slices, which are added in their order.
std::vector<double> SumByTensor(const SlicePlan& plan, std::span<const double> by_slice);

}  // namespace ps
