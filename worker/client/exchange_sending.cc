// What an exchange sends: gradients as they become ready, and what becomes of the push when all are.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/finite.h"
#include "common/half_floats.h"
#include "worker/client/exchange.h"
#include "worker/client/push_encoding.h"

namespace ps {
namespace {

constexpr size_t kSlicesAtOnce = 8;  // Together a MiB, unless tensors are small.

}  // namespace

void RetryingExchange::BeginSending(size_t tensor, std::span<const float> gradient, std::function<void()> release,
                                    bool finite) {
  if (!BeginTensor(tensor, gradient) || !TryHoldMemory()) {
    if (release) release();
    return;
  }
  auto send = [self = shared_from_this(), tensor, finite, release = std::move(release)] {
    self->SendTensor(tensor, finite);
    if (release) self->ReleaseLater(release);
    self->ReleaseMemory();
  };
  if (context_->sender == nullptr) return send();
  context_->sender->Post(std::move(send));
}

void RetryingExchange::TensorAbsent(size_t tensor) {
  MutexLock lock(mutex_);
  if (decided_ || request_.sends_no_slices()) return;
  const Layout& layout = context_->plan.layout();
  const bool may = request_.pushes() && request_.push.contribution == PushContribution::kGradient &&
                   tensor < layout.size() && layout[tensor].kind == TensorKind::kWeight;
  if (!may || !ready_.BeginTensor(tensor)) {
    return End(absl::InvalidArgumentError(absl::StrCat(Who(), ": TensorAbsent for tensor ", tensor,
                                                       ", which is ready already, or has no gradient that is pushed")));
  }
  absent_[tensor] = 1;
  const std::vector<uint32_t>& slices = tensor_slices_[tensor];
  SlicesReady(slices, /*last_of_tensor=*/true);
}

bool RetryingExchange::BeginTensor(size_t tensor, std::span<const float> gradient) {
  MutexLock lock(mutex_);
  if (decided_ || request_.sends_no_slices()) return false;
  const Layout& layout = context_->plan.layout();
  if (!ready_.BeginTensor(tensor)) {
    End(absl::InvalidArgumentError(absl::StrCat(Who(), ": TensorReady for tensor ", tensor,
                                                ", which is ready already, is not pushed or does not exist")));
    return false;
  }
  if (!gradient.empty() && request_.push.rounded) {
    End(absl::InvalidArgumentError(absl::StrCat(Who(), ": TensorReady with a gradient of tensor ", layout[tensor].name,
                                                ", but PushInfo.rounded")));
    return false;
  }
  if (!gradient.empty()) out_[tensor] = gradient;
  if (request_.push.rounded || out_[tensor].size() == static_cast<size_t>(layout[tensor].elements())) return true;
  End(absl::InvalidArgumentError(absl::StrCat(Who(), ": TensorReady with ", out_[tensor].size(),
                                              " elements for tensor ", ToString(layout[tensor]))));
  return false;
}

// Some slices after the others: they are on their way while the next are looked at. A push of which a part is not
// finite is never completed, and the servers drop what came of it.
void RetryingExchange::SendTensor(size_t tensor, bool finite) {
  const std::span<const uint32_t> slices = tensor_slices_[tensor];
  for (size_t begin = 0; begin < slices.size(); begin += kSlicesAtOnce) {
    const auto some = slices.subspan(begin, std::min(kSlicesAtOnce, slices.size() - begin));
    const bool all_finite =
        std::all_of(some.begin(), some.end(), [&](uint32_t slice) { return LookAt(tensor, slice, finite); });
    MutexLock lock(mutex_);
    if (decided_) return;
    if (!all_finite) return OnNotFinite(tensor);
    SlicesReady(some, begin + some.size() == slices.size());
  }
}

bool RetryingExchange::LookAt(size_t tensor, uint32_t slice, bool finite) const {
  const SliceInfo& info = context_->plan.slices()[slice];
  if (request_.rounded != nullptr) return LookAtRounded(info, finite);
  const float* values = out_[tensor].data() + info.offset;
  if (Encodes(tensor)) {
    // A difference of weights has its worker's momentum in it.
    const bool gradient = request_.push.contribution == PushContribution::kGradient;
    return EncodeSlice(values, info, *request_.shared, request_.residuals.get(),
                       gradient ? context_->wire.momentum_correction : 0);
  }
  finite = finite || servers_look_ || AllFinite(values, static_cast<size_t>(info.elements), BestIsa());
  if (request_.staged && finite) {
    std::memcpy(request_.shared->bytes().data() + request_.shared->model().slice(info).begin, values,
                static_cast<size_t>(info.bytes()));
  }
  return finite;
}

bool RetryingExchange::LookAtRounded(const SliceInfo& slice, bool finite) const {
  const ModelMemory::Place place = request_.rounded->model().slice(slice);
  const uint8_t* const values = request_.rounded->bytes().data() + place.begin;
  const auto elements = static_cast<size_t>(slice.elements);
  if (!finite) {
    finite = place.type == WireType::kFloat32 ? AllFinite(values, elements, BestIsa())
                                              : AllFiniteHalf(values, elements, place.type, BestIsa());
  }
  if (finite && request_.shared != request_.rounded) {
    std::memcpy(request_.shared->bytes().data() + place.begin, values, place.values);
  }
  return finite;
}

void RetryingExchange::CommitResiduals(uint32_t shard) {
  if (request_.residuals == nullptr || PullsOnly() || told_samples_ == 0) return;
  std::vector<uint32_t> encoded;
  for (const uint32_t slice : ready_.slices()) {
    const SliceInfo& info = context_->plan.slices()[slice];
    if (info.shard == shard && Encodes(info.tensor) && absent_[info.tensor] == 0) encoded.push_back(slice);
  }
  request_.residuals->Commit(shard, request_.push.step, encoded);
}

void RetryingExchange::ReleaseLater(const std::function<void()>& release) {
  MutexLock lock(end_mutex_);
  releases_.push_back(release);
}

void RetryingExchange::OnNotFinite(size_t tensor) {
  if (!request_.push.skip_not_finite) {
    if (request_.pushes() && context_->on_not_finite) context_->on_not_finite();
    return End(NotFinite(tensor));
  }
  not_finite_ = not_finite_.value_or(tensor);
  ready_.EndTensor();
  if (ready_.all()) (void)OnAllReady();
}

void RetryingExchange::SlicesReady(std::span<const uint32_t> slices, bool last_of_tensor) {
  for (const uint32_t slice : slices) ready_.Add(slice);
  told_slices_ = true;
  if (last_of_tensor) ready_.EndTensor();
  const bool last = ready_.all();
  if (last && OnAllReady()) return;
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    ShardCall* call = shards_[shard].call.get();
    if (call == nullptr) continue;
    const std::vector<uint32_t> fresh = ready_.NewOfShard(shard, slices);
    if (last || !fresh.empty()) call->Send(fresh, last);
  }
}

bool RetryingExchange::SetSamples(uint32_t samples) {
  MutexLock lock(mutex_);
  if (decided_ || !request_.pushes() || request_.sends_no_slices() || ready_.all()) return false;
  samples_ = samples;
  return true;
}

bool RetryingExchange::OnAllReady() {
  all_ready_at_ = timer_.now();
  if (not_finite_.has_value()) samples_ = 0;
  if (samples_ == told_samples_) return false;
  told_samples_ = samples_;
  AskAnew();
  return true;
}

// No shard has all of the push that it was told of, so it may still be replaced.
void RetryingExchange::AskAnew() {
  if (request_.kind == CallKind::kPush && PullsOnly()) return End(absl::OkStatus());
  anew_ = true;
  for (ShardState& state : shards_) {
    if (state.call == nullptr) continue;
    state.outdated = true;
    state.call->Cancel();
  }
}

std::string RetryingExchange::TooLarge(size_t tensor) const {
  const WireType type = Encodes(tensor) ? request_.shared->model().weights().type : WireType::kFloat32;
  if (type == WireType::kFloat32) return "";
  return absl::StrCat(", or too large for --wire_dtype=", ToString(type));
}

absl::Status RetryingExchange::NotFinite(size_t tensor) const {
  return absl::InvalidArgumentError(
      absl::StrCat(Who(), request_.pushes() ? ": the gradient of" : ": the initial value of", " tensor ",
                   context_->plan.layout()[tensor].name, " is not finite", TooLarge(tensor),
                   request_.pushes() ? "; the learning rate may be too large" : ""));
}

}  // namespace ps
