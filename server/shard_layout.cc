#include "server/shard_layout.h"

#include "absl/strings/str_cat.h"

namespace ps {

ShardLayout::ShardLayout(Layout model, uint32_t shard, uint32_t num_shards)
    : plan_(std::move(model), num_shards), shard_(shard), local_(plan_.slices().size(), -1) {
  const std::vector<uint32_t>& mine = plan_.shard_slices(shard);
  for (const uint32_t slice : plan_.pushed_shard_slices(shard)) {
    pushed_bytes_ += static_cast<uint64_t>(plan_.slices()[slice].bytes());
  }
  for (size_t local = 0; local < mine.size(); ++local) local_[mine[local]] = static_cast<int32_t>(local);
}

absl::StatusOr<size_t> ShardLayout::LocalIndex(const ReceivedSlice& received, bool may_be_absent) const {
  if (received.index >= local_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", received.index, ": the model's slices are 0 to ", local_.size() - 1));
  }
  const SliceInfo& info = plan_.slices()[received.index];
  if (local_[received.index] < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", received.index, " is shard ", info.shard, "'s, not shard ", shard_, "'s"));
  }
  const bool absent = may_be_absent && received.payload.absent();
  const size_t expected = absent ? 0 : static_cast<size_t>(info.bytes());
  if (received.payload.bytes() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("slice ", received.index, " of tensor ",
                                                   plan_.layout()[info.tensor].name, ": ", received.payload.bytes(),
                                                   " bytes, expected ", expected, absent ? ", as it is absent" : ""));
  }
  return static_cast<size_t>(local_[received.index]);
}

}  // namespace ps
