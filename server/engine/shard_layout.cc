#include "server/engine/shard_layout.h"

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

// That these are the job's type of elements, and some of them where only some are sent.
absl::Status CheckForm(const Payload& payload, const PushFormat& format, int64_t elements) {
  if (payload.sent_as() != format.type) {
    return InvalidArgument(
        "its elements are ", ToString(payload.sent_as()), ", expected ", ToString(format.type),
        format.type == WireType::kFloat32 ? "" : absl::StrCat(" (--wire_dtype=", ToString(format.type), ")"));
  }
  const auto sent = static_cast<size_t>(format.Sent(elements));
  const SparseValues* const sparse = payload.sparse().get();
  if (static_cast<int64_t>(sent) == elements) {
    if (!payload.has_positions()) return absl::OkStatus();
    return InvalidArgument("it has positions, though all of its ", elements, " elements are to be sent");
  }
  if (sparse == nullptr || sparse->positions.empty() || sparse->positions.size() > sent) {
    return InvalidArgument(sparse == nullptr ? 0 : sparse->positions.size(), " positions; expected 1 to ", sent,
                           ", of ", elements, " elements (--compress)");
  }
  if (sparse->positions.back() < elements) return absl::OkStatus();
  return InvalidArgument("position ", sparse->positions.back(), ": it has ", elements, " elements");
}

}  // namespace

ShardLayout::ShardLayout(Layout model, uint32_t shard, uint32_t num_shards, const PushFormat& pushes)
    : plan_(std::move(model), num_shards), shard_(shard), pushes_(pushes), local_(plan_.slices().size(), -1) {
  const std::vector<uint32_t>& mine = plan_.shard_slices(shard);
  for (size_t local = 0; local < mine.size(); ++local) {
    if (is_pushed(local)) pushed_bytes_ += pushed_bytes(local);
  }
  for (size_t local = 0; local < mine.size(); ++local) local_[mine[local]] = static_cast<int32_t>(local);
}

uint64_t ShardLayout::pushed_bytes(size_t local) const {
  const int64_t elements = slice(local).elements;
  const PushFormat format = PushFormatOf(tensor(local).kind, pushes_);
  const auto sent = static_cast<uint64_t>(format.Sent(elements));
  const bool sparse = format.Sent(elements) < elements;
  const bool unpacked = sparse || format.type == WireType::kE3m0;
  return sent * ((unpacked ? sizeof(float) : WireBytes(format.type)) + (sparse ? sizeof(uint16_t) : 0));
}

absl::StatusOr<size_t> ShardLayout::LocalIndexOf(uint32_t index) const {
  if (index >= local_.size()) {
    return InvalidArgument("slice ", index, ": the model's slices are 0 to ", local_.size() - 1);
  }
  if (local_[index] >= 0) return static_cast<size_t>(local_[index]);
  return InvalidArgument("slice ", index, " is shard ", plan_.slices()[index].shard, "'s, not shard ", shard_, "'s");
}

absl::StatusOr<size_t> ShardLayout::LocalIndex(const ReceivedSlice& received, Of of) const {
  PS_ASSIGN_OR_RETURN(const size_t local, LocalIndexOf(received.index));
  const SliceInfo& info = plan_.slices()[received.index];
  const TensorSpec& tensor = plan_.layout()[info.tensor];
  const bool absent = of == Of::kPush && received.payload.absent();
  const PushFormat format = of == Of::kPush ? PushFormatOf(tensor.kind, pushes_) : PushFormat();
  if (const absl::Status form = absent ? absl::OkStatus() : CheckForm(received.payload, format, info.elements);
      !form.ok()) {
    return Annotate(form, absl::StrCat("slice ", received.index, " of tensor ", tensor.name));
  }
  const size_t expected = absent ? 0 : WireBytes(format.type, static_cast<size_t>(info.elements));
  if (received.payload.sparse() == nullptr && received.payload.sent_bytes() != expected) {
    return InvalidArgument("slice ", received.index, " of tensor ", tensor.name, ": ", received.payload.sent_bytes(),
                           " bytes, expected ", expected, absent ? ", as it is absent" : "");
  }
  return local;
}

std::vector<double> SumByTensor(const SlicePlan& plan, std::span<const double> by_slice) {
  Check(by_slice.size() == plan.slices().size(), "there is a sum of every slice");
  std::vector<double> by_tensor(plan.layout().size(), 0.0);
  for (const SliceInfo& slice : plan.slices()) by_tensor[slice.tensor] += by_slice[slice.index];
  return by_tensor;
}

}  // namespace ps
