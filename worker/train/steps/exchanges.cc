#include "worker/train/steps/exchanges.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

// A worker that catches up pulls so often at most: however fast the others are, one of so many pulls falls between two
// of their steps.
constexpr int kMostPulls = 100;

constexpr std::chrono::microseconds kShortestWait(10);  // Traces show no shorter one of the thread that trains.

std::chrono::nanoseconds Nanos(double seconds) { return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)); }

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
  handed_at_ = Now();
}

void Exchanges::Waited(TimePoint since) {
  const TimePoint now = Now();
  exposed_s_ += Seconds(now - since);
  if (trace_ == nullptr || !trace_->Wants(push_.step) || now - since < kShortestWait) return;
  trace_->Add({.row = kComputeRow, .nests = true, .name = "await weights", .begin = since, .end = now});
}

// The exchange ended at the latest as long after its last gradient was ready as its parts took, and before now. So an
// arrow never leaves later, nor ends earlier, than it did, which is what clocks are aligned by.
void Exchanges::Trace(const ExchangeResult& result, TimePoint now) {
  if (trace_ == nullptr || !trace_->Wants(push_.step)) return;
  const std::chrono::nanoseconds all = Nanos(result.push_s + result.wait_s + result.pull_s);
  TraceSpan pull = {.row = "exchanges", .name = "pull", .end = std::min(now, ready_at_ + all)};
  pull.begin = std::max(handed_at_, pull.end - Nanos(result.pull_s));
  TraceSpan wait = {.row = pull.row, .name = "wait", .end = pull.begin};
  wait.begin = std::max(handed_at_, wait.end - Nanos(result.wait_s));
  TraceSpan push = {.row = pull.row, .name = absl::StrCat("push ", push_.step), .begin = handed_at_, .end = wait.begin};
  push.args.Add("step", push_.step).Add("version", push_.version).Add("samples", push_.samples);
  pull.args.Add("step", push_.step).Add("version", result.version);
  for (uint32_t shard = 0; shard < result.answers.size(); ++shard) {
    TraceArrow arrow = {.part = ArrowPart::kLeaves,
                        .push = {.generation = client_.generation(),
                                 .rank = client_.rank(),
                                 .incarnation = client_.incarnation(),
                                 .step = push_.step},
                        .shard = shard};
    push.arrows.push_back(arrow);
    arrow.part = ArrowPart::kEnds;
    pull.arrows.push_back(arrow);
  }
  trace_->Add(push);
  trace_->Add(wait);
  trace_->Add(pull);
}

void Exchanges::Start(uint32_t samples, PushContribution contribution, const ConstTensors& out,
                      const MutableTensors& in, bool deferred, std::optional<uint64_t> passed) {
  SetPush(samples, contribution, in, passed);
  exchange_ = client_.StartPushPull(push_, out, in, deferred);
  ready_at_ = Now();
}

void Exchanges::StartEarlier(uint32_t samples, PushContribution contribution, uint64_t version,
                             std::vector<uint64_t> versions, std::vector<uint32_t> tensors, const ConstTensors& out,
                             const MutableTensors& in, uint64_t passed) {
  SetPush(samples, contribution, in, passed);
  push_.version = version;
  push_.versions = std::move(versions);
  push_.tensors = std::move(tensors);
  exchange_ = client_.StartPushPull(push_, out, in, /*deferred=*/false);
  ready_at_ = Now();
}

void Exchanges::StartView(uint32_t samples, const ConstTensors& out, const MutableTensors& in, bool deferred,
                          std::optional<uint64_t> passed) {
  SetPush(samples, PushContribution::kGradient, in, passed);
  viewing_ = client_.can_view();
  exchange_ = client_.StartPushView(push_, out, in, deferred);
  ready_at_ = Now();
}

absl::Status Exchanges::AwaitTensor(size_t tensor) {
  if (exchange_ == nullptr) return absl::OkStatus();
  const Waiting::Scope waits(waiting_);
  const TimePoint began = Now();
  absl::Status status = exchange_->WaitTensor(tensor);
  Waited(began);
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
  Waited(began);
  Trace(result, Now());
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
