#include "worker/client/gradient_memory.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "common/wire_type.h"

namespace ps {
namespace {

constexpr size_t kMostStaging = 4;  // Pieces of memory for gradients of the caller's own.

}  // namespace

absl::Status GradientMemory::MakeSpare() {
  MutexLock lock(mutex_);
  if (spare_ != nullptr) return absl::OkStatus();
  PS_ASSIGN_OR_RETURN(spare_, SharedTensors::Create(layout_));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<SharedTensors>> GradientMemory::Make() {
  if (spare_ != nullptr) return std::exchange(spare_, nullptr);
  return SharedTensors::Create(layout_);
}

absl::StatusOr<TensorMemory> GradientMemory::Buffers(bool shared) {
  MutexLock lock(mutex_);
  if (buffers_.has_value()) return *buffers_;
  absl::StatusOr<std::shared_ptr<SharedTensors>> made = absl::UnavailableError("");
  if (shared) made = Make();
  if (made.ok()) {
    shared_ = *made;
    buffers_ = TensorMemory{
        .tensors = (*made)->tensors(), .owner = *made, .block = std::as_writable_bytes((*made)->memory().bytes())};
    return *buffers_;
  }
  // What is pushed is copied, or goes over gRPC.
  absl::StatusOr<TensorMemory> plain = AllocateTensors(layout_);
  if (plain.ok()) buffers_ = *plain;
  return plain;
}

std::shared_ptr<SharedTensors> GradientMemory::FreeStaging() {
  // These were earlier pushes' memory; one that an exchange holds is still being read.
  std::erase_if(staging_, [](const auto& each) { return each->detached(); });
  const auto free =
      std::find_if(staging_.begin(), staging_.end(), [](const auto& each) { return each.use_count() == 1; });
  return free == staging_.end() ? nullptr : *free;
}

absl::StatusOr<std::shared_ptr<SharedTensors>> GradientMemory::MakeEncoded(const PushFormat& format,
                                                                           bool shared) const {
  return shared ? SharedTensors::Create(layout_, format) : SharedTensors::CreateOwn(layout_, format);
}

absl::StatusOr<RoundedMemory> GradientMemory::Rounded(const PushFormat& format, bool shared) {
  MutexLock lock(mutex_);
  if (rounded_ == nullptr) {
    PS_ASSIGN_OR_RETURN(rounded_, MakeEncoded(format, shared));
  }
  const std::span<std::byte> block = std::as_writable_bytes(rounded_->bytes());
  RoundedMemory memory = {.type = format.type, .tensors = {}, .owner = rounded_, .block = block};
  for (size_t i = 0; i < layout_.size(); ++i) {
    const size_t bytes =
        static_cast<size_t>(layout_[i].elements()) * WireBytes(WireTypeOf(layout_[i].kind, format.type));
    memory.tensors.push_back(block.subspan(rounded_->model().tensor(i), bytes));
  }
  return memory;
}

absl::Status GradientMemory::Encode(ExchangeRequest& request, const PushFormat& format, bool shared) {
  MutexLock lock(mutex_);
  request.encoded = true;
  if (request.push.rounded) {
    if (rounded_ == nullptr) {
      return absl::InvalidArgumentError("PushInfo.rounded: there is no memory of Client::RoundedGradients");
    }
    request.rounded = rounded_;
    if (!rounded_->shared() || !rounded_->detached()) {
      request.shared = rounded_;
      return absl::OkStatus();
    }
  }
  request.staged = true;
  request.shared = FreeStaging();
  if (request.shared != nullptr) return absl::OkStatus();
  const bool keeps = staging_.size() < kMostStaging;
  PS_ASSIGN_OR_RETURN(request.shared, MakeEncoded(format, shared && keeps));
  if (keeps) staging_.push_back(request.shared);
  return absl::OkStatus();
}

void GradientMemory::Share(ExchangeRequest& request) {
  MutexLock lock(mutex_);
  if (shared_ != nullptr && !shared_->detached() && shared_->Holds(request.out)) {
    request.shared = shared_;
    return;
  }
  request.shared = FreeStaging();
  if (request.shared == nullptr && staging_.size() < kMostStaging) {
    if (absl::StatusOr<std::shared_ptr<SharedTensors>> made = Make(); made.ok()) {
      request.shared = staging_.emplace_back(*std::move(made));
    }
  }
  // Else over gRPC: the caller keeps many exchanges, or there is no memory to share.
  request.staged = request.shared != nullptr;
}

}  // namespace ps
