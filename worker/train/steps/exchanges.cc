#include "worker/train/steps/exchanges.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

// A worker that catches up pulls so often at most: however fast the others are, one of so many pulls falls between two
// of their steps.
constexpr int kMostPulls = 100;

}  // namespace

Exchanges::Exchanges(Client& client, ExchangeResult started, Waiting& waiting)
    : client_(client),
      waiting_(waiting),
      // Others may have gone on between this worker's join and its start.
      step_(client.synchronous() ? std::max(client.start_step(), started.version) : client.start_step()),
      latest_(std::move(started)) {}

void Exchanges::SetPush(uint32_t samples, PushContribution contribution, const MutableTensors& in,
                        std::optional<uint64_t> passed) {
  Check(exchange_ == nullptr, "a worker has one exchange under way");
  push_ = {.step = step_,
           .version = latest_.version,
           .versions = latest_.versions,
           .samples = samples,
           .contribution = contribution,
           .passed = passed,
           .runs = runs_,
           .rounded = rounded_};
  in_ = in;
  exposed_s_ = 0;
  viewing_ = false;
}

void Exchanges::Start(uint32_t samples, PushContribution contribution, const ConstTensors& out,
                      const MutableTensors& in, bool deferred, std::optional<uint64_t> passed) {
  SetPush(samples, contribution, in, passed);
  exchange_ = client_.StartPushPull(push_, out, in, deferred);
}

void Exchanges::StartEarlier(uint32_t samples, PushContribution contribution, uint64_t version,
                             std::vector<uint64_t> versions, std::vector<uint32_t> tensors, const ConstTensors& out,
                             const MutableTensors& in, uint64_t passed) {
  SetPush(samples, contribution, in, passed);
  push_.version = version;
  push_.versions = std::move(versions);
  push_.tensors = std::move(tensors);
  exchange_ = client_.StartPushPull(push_, out, in, /*deferred=*/false);
}

void Exchanges::StartView(uint32_t samples, const ConstTensors& out, const MutableTensors& in, bool deferred,
                          std::optional<uint64_t> passed) {
  SetPush(samples, PushContribution::kGradient, in, passed);
  viewing_ = client_.can_view();
  exchange_ = client_.StartPushView(push_, out, in, deferred);
}

absl::Status Exchanges::AwaitTensor(size_t tensor) {
  if (exchange_ == nullptr) return absl::OkStatus();
  const Waiting::Scope waits(waiting_);
  const TimePoint began = Now();
  absl::Status status = exchange_->WaitTensor(tensor);
  exposed_s_ += Seconds(Now() - began);
  return status;
}

absl::StatusOr<EndedExchange> Exchanges::End() {
  Check(exchange_ != nullptr, "an exchange is under way");
  const Waiting::Scope waits(waiting_);
  const TimePoint began = Now();
  PS_ASSIGN_OR_RETURN(ExchangeResult result, std::exchange(exchange_, nullptr)->Wait());
  step_ = std::max(step_ + 1, result.next_step);
  if (!in_.empty()) {
    PS_RETURN_IF_ERROR(CatchUp(result));
    latest_ = result;
  }
  exposed_s_ += Seconds(Now() - began);
  return EndedExchange{.push = std::move(push_), .result = std::move(result), .exposed_s = exposed_s_};
}

// Only where versions are not exact: the shards of a push that came too late have gone on, and not all equally far.
absl::Status Exchanges::CatchUp(ExchangeResult& result) {
  if (!client_.synchronous() || client_.policy().exact_versions) return absl::OkStatus();
  for (int pulls = 0; pulls < kMostPulls; ++pulls) {
    step_ = std::max(step_, *std::max_element(result.versions.begin(), result.versions.end()));
    if (result.version == step_) return absl::OkStatus();
    absl::StatusOr<ExchangeResult> pulled = client_.Pull(in_, step_, step_);
    // Another step was made meanwhile, and this version is gone: which one is the newest?
    if (absl::IsFailedPrecondition(pulled.status())) pulled = client_.Pull(in_, std::nullopt, step_);
    if (!pulled.ok()) return pulled.status();
    result.version = pulled->version;
    result.versions = pulled->versions;
    result.view = {};
    result.pull_s += pulled->pull_s;
    result.wait_s += pulled->wait_s;
  }
  return Unavailable("step ", step_, ": after ", kMostPulls, " pulls the shards' versions still differ");
}

absl::StatusOr<ExchangeResult> Exchanges::Pull(const MutableTensors& in, bool float32) {
  Check(exchange_ == nullptr, "a worker has one exchange under way");
  const Waiting::Scope waits(waiting_);
  absl::StatusOr<ExchangeResult> pulled = float32 ? client_.PullFloat32(in) : client_.Pull(in, std::nullopt, step_);
  if (pulled.ok()) latest_ = *pulled;
  return pulled;
}

}  // namespace ps
