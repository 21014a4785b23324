#include "server/transport/state_messages.h"

#include <utility>

#include "common/endpoint.h"

namespace ps {
namespace {

constexpr int64_t kSliceHeaderBytes = 32;  // So that small slices, too, are not without number in a message.

}  // namespace

StateMessages::StateMessages(StatePin state) : state_(std::move(state)) { FindWeight(); }

void StateMessages::FindWeight() {
  const ShardLayout& layout = state_->layout();
  while (next_ < layout.slices() && layout.tensor(next_).kind != TensorKind::kWeight) ++next_;
}

std::optional<StateMessages::Message> StateMessages::Next() {
  if (!state_.has_value()) return std::nullopt;
  const ShardLayout& layout = state_->layout();
  Message message;
  message.reply.set_version(state_->version());
  for (int64_t bytes = 0; next_ < layout.slices(); FindWeight()) {
    const SliceInfo& info = layout.slice(next_);
    const int64_t slice_bytes =
        info.elements * static_cast<int64_t>(state_->tensors() * sizeof(float)) + kSliceHeaderBytes;
    if (bytes > 0 && bytes + slice_bytes > kMostMessageSliceBytes) return message;
    bytes += slice_bytes;
    v1::StateSlice* const slice = message.reply.add_slices();
    slice->set_index(info.index);
    slice->set_updates(state_->updates(next_));
    for (size_t k = 0; k < state_->tensors(); ++k) {
      const std::span<const float> values = state_->slice(k, next_);
      slice->add_tensors(values.data(), values.size_bytes());
    }
    ++next_;
  }
  message.last = true;
  state_.reset();
  return message;
}

}  // namespace ps
