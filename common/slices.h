// What a layout (ps/tensor.h) may be, and how a model is cut into slices and spread over shards: a pure function of the
// layout and the number of shards.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/tensor.h"

namespace ps {

// Elements of a full slice: 128 KiB of float32. A server begins to answer when the first slice of a push has come from
// all, and a worker feeds all servers at once, so smaller ones fill a network sooner (tests/bench/TRIALS.md).
inline constexpr int64_t kSliceElements = 32768;

// Limits of a layout that a server accepts from the wire.
inline constexpr size_t kMaxTensors = 524288;
inline constexpr size_t kMaxNamesBytes = 32 << 20;  // The names of all tensors together.
inline constexpr int64_t kMaxModelElements = int64_t{1} << 36;

// A run of consecutive elements of one tensor.
struct SliceInfo {
  uint32_t index = 0;        // It counts the whole model's, in layout order.
  uint32_t tensor = 0;       // Index in the layout.
  int64_t offset = 0;        // First element within the tensor.
  int64_t elements = 0;      // There are kSliceElements at most.
  uint32_t shard = 0;        // Which shard holds it.
  int64_t shard_offset = 0;  // First element within that shard's contiguous buffer.

  int64_t bytes() const { return elements * static_cast<int64_t>(sizeof(float)); }
};

// The cut of one layout over a number of shards. Immutable.
class SlicePlan {
 public:
  SlicePlan() = default;
  // The layout must be valid (ValidateLayout) and num_shards at least 1. Slices go to shards largest first, each to the
  // shard with the fewest bytes so far (the lowest number on a tie), so shards differ by at most one slice.
  SlicePlan(Layout layout, uint32_t num_shards);

  const Layout& layout() const { return layout_; }
  uint32_t num_shards() const { return static_cast<uint32_t>(by_shard_.size()); }
  const std::vector<SliceInfo>& slices() const { return slices_; }
  // Indexes of the slices of one shard, ascending.
  const std::vector<uint32_t>& shard_slices(uint32_t shard) const { return by_shard_[shard]; }
  // Those of them that a push carries, ascending: all but the slices of constants.
  const std::vector<uint32_t>& pushed_shard_slices(uint32_t shard) const { return pushed_by_shard_[shard]; }
  // Elements of all slices of one shard; its buffer pads every slice to kSliceAlignment elements.
  int64_t shard_elements(uint32_t shard) const { return shard_elements_[shard]; }
  int64_t shard_buffer_elements(uint32_t shard) const { return shard_buffer_elements_[shard]; }
  int64_t total_elements() const;

 private:
  Layout layout_;
  std::vector<SliceInfo> slices_;
  std::vector<std::vector<uint32_t>> by_shard_;
  std::vector<std::vector<uint32_t>> pushed_by_shard_;
  std::vector<int64_t> shard_elements_;
  std::vector<int64_t> shard_buffer_elements_;
};

// Slices start on 64-byte boundaries (a cache line, an AVX-512 vector) within a shard's buffer.
inline constexpr int64_t kSliceAlignment = 16;

// INVALID_ARGUMENT, naming the tensor, if the layout is empty, too large, without a weight, or has bad or repeated
// names, bad dimensions, bad factors or an unknown kind.
absl::Status ValidateLayout(const Layout& layout);

// Slices of a model, by number: from begin to before end.
struct SliceRange {
  uint32_t begin = 0;
  uint32_t end = 0;

  bool operator==(const SliceRange&) const = default;
};
using SliceRanges = std::vector<SliceRange>;  // Ascending and apart.
inline constexpr size_t kMaxRanges = 2048;    // A partial push has no more: each of its messages says them.

// The slices of these tensors, which ascend.
SliceRanges SlicesOf(const SlicePlan& plan, std::span<const uint32_t> tensors);
bool Contain(const SliceRanges& ranges, uint32_t slice);

inline constexpr uint32_t kMaxFragments = 1024;

// The tensors of each of so many fragments, ascending, as LocalSteps.fragments (ps.proto) says. A fragment of a model
// with few tensors may have none.
std::vector<std::vector<uint32_t>> FragmentsOf(const Layout& layout, uint32_t fragments);

// What tells it from other layouts, as LayoutPart (ps.proto) says: 32 hexadecimal digits.
std::string LayoutHash(const Layout& layout);
// Whether the text can be such a hash.
bool IsLayoutHash(std::string_view text);

}  // namespace ps
