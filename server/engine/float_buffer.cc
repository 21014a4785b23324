#include "server/engine/float_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include <spdlog/spdlog.h>
#include "common/check.h"
#include "common/status.h"

namespace ps {

namespace {

size_t BytesFor(size_t elements) { return std::max<size_t>(64, (elements * sizeof(float) + 63) / 64 * 64); }

}  // namespace

FloatBuffer::FloatBuffer(size_t elements, std::optional<float> value) : size_(elements) {
  own_.reset(static_cast<float*>(std::aligned_alloc(64, BytesFor(elements))));
  if (own_ == nullptr) throw std::bad_alloc();
  data_ = own_.get();
  if (value.has_value()) std::fill_n(data_, BytesFor(elements) / sizeof(float), *value);
}

FloatBuffer::FloatBuffer(size_t elements, std::optional<float> value, SharedMemory shared)
    : size_(elements), shared_(std::move(shared)), data_(reinterpret_cast<float*>(shared_.bytes().data())) {
  if (value.has_value()) std::fill_n(data_, shared_.bytes().size() / sizeof(float), *value);
}

FloatBuffer FloatBuffer::Shared(size_t elements, std::optional<float> value) {
  absl::StatusOr<SharedMemory> memory =
      SharedMemory::Create("weights", BytesFor(elements), SharedMemory::Access::kRead);
  if (memory.ok()) return FloatBuffer(elements, value, *std::move(memory));
  spdlog::warn("{}; workers of this host will use gRPC", Message(memory.status()));
  return FloatBuffer(elements, value);
}

void FloatBuffer::Free::operator()(float* data) const { std::free(data); }

BufferRing::BufferRing(size_t elements, std::vector<float> values, size_t max_sets, bool shared, bool rounded)
    : elements_(elements),
      values_(std::move(values)),
      max_sets_(max_sets),
      shared_(shared),
      rounded_(rounded),
      current_(Make(/*with_values=*/true)) {}

std::shared_ptr<HeldBuffers> BufferRing::Make(bool with_values) const {
  auto made = std::make_shared<HeldBuffers>();
  const auto first = [&](float value) { return with_values ? std::optional<float>(value) : std::nullopt; };
  for (const float value : values_) {
    made->tensors.push_back(shared_ ? FloatBuffer::Shared(elements_, first(value))
                                    : FloatBuffer(elements_, first(value)));
  }
  if (rounded_) made->rounded.emplace((elements_ + 1) / 2, first(0));
  return made;
}

// If there is no memory for one more, updates wait for those that there are.
std::shared_ptr<HeldBuffers> BufferRing::MakeSpare() {
  try {
    return spare_.emplace_back(Make(/*with_values=*/false));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

bool BufferRing::Pick(bool in_place) {
  Check(next_ == nullptr, "one update is being written at a time");
  // Sequentially consistent, as a release is: either the hold is seen gone here, or its release sees who is blocked.
  if (in_place && current_->holds.load() == 0) {
    next_ = current_;
    return true;
  }
  const auto free =
      std::find_if(spare_.begin(), spare_.end(), [](const auto& buffers) { return buffers->holds.load() == 0; });
  if (free != spare_.end()) {
    next_ = *free;
  } else if (spare_.size() + 1 < max_sets_) {
    next_ = MakeSpare();
  }
  return next_ != nullptr;
}

bool BufferRing::has_spare() const {
  return spare_.size() + 1 < max_sets_ ||
         std::any_of(spare_.begin(), spare_.end(), [](const auto& buffers) { return buffers->holds.load() == 0; });
}

size_t BufferRing::used() const {
  const auto is_used = [this](const auto& buffers) { return buffers == next_ || buffers->holds.load() > 0; };
  return 1 + static_cast<size_t>(std::count_if(spare_.begin(), spare_.end(), is_used));
}

void BufferRing::Publish(uint64_t version) {
  Check(next_ != nullptr, "what is published was being written");
  next_->version = version;
  if (next_ != current_) {
    std::replace(spare_.begin(), spare_.end(), next_, current_);
    current_ = next_;
  }
  next_ = nullptr;
}

}  // namespace ps
