#include "worker/client/heartbeats.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <grpcpp/client_context.h>
#include "common/grpc_status.h"
#include "common/text.h"
#include "worker/client/deadline.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kCallTime(10);
constexpr size_t kMaxBusyBytes = 256;  // As servers take.

}  // namespace

struct Heartbeats::Beat {
  grpc::ClientContext context;
  v1::HeartbeatRequest request;
  v1::HeartbeatReply reply;
};

Heartbeats::Heartbeats(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, std::chrono::nanoseconds lease,
                       ChiefCallbacks callbacks)
    : chief_(chief), timer_(timer), id_(std::move(id)), lease_(lease), callbacks_(std::move(callbacks)) {}

void Heartbeats::Start() {
  MutexLock lock(mutex_);
  Schedule(timer_.now() + lease_ / 3);
}

void Heartbeats::Schedule(TimePoint when) {
  timer_.At(when, [this, turn = ++turn_] { Send(turn); });
}

void Heartbeats::BeatNow() {
  MutexLock lock(mutex_);
  if (stopped_) return;
  if (sending_) {
    again_ = true;
  } else {
    Schedule(timer_.now());
  }
}

void Heartbeats::SetStep(uint64_t step) {
  MutexLock lock(mutex_);
  step_ = std::max(step_, step);
}

void Heartbeats::SetBusy(const std::string& what) {
  MutexLock lock(mutex_);
  busy_with_ = Printable(what, kMaxBusyBytes);
}

void Heartbeats::Send(uint64_t turn) {
  auto beat = std::make_shared<Beat>();
  SetDeadline(beat->context, std::min<std::chrono::nanoseconds>(kCallTime, lease_));
  *beat->request.mutable_id() = id_;
  {
    MutexLock lock(mutex_);
    if (stopped_ || sending_ || turn != turn_) return;
    beat->request.set_step(step_);
    beat->request.set_busy_with(busy_with_);
    sending_ = true;
  }
  chief_.async()->Heartbeat(&beat->context, &beat->request, &beat->reply,
                            [this, beat](const grpc::Status& status) { OnEnd(status, beat->reply); });
}

void Heartbeats::OnEnd(const grpc::Status& status, const v1::HeartbeatReply& reply) {
  const bool refused = status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
  const bool over = status.ok() && JobIsOver(reply);
  if (refused) callbacks_.on_refused(FromGrpc(status));
  if (status.ok()) callbacks_.on_state(reply);
  MutexLock lock(mutex_);
  // Under the lock: once Stop has seen that nothing is being sent, nothing is scheduled any more.
  const auto pause = std::exchange(again_, false) ? std::chrono::nanoseconds(0) : lease_ / 3;
  if (!refused && !over && !stopped_) Schedule(timer_.now() + pause);
  sending_ = false;
  ended_.NotifyAll();
}

void Heartbeats::AwaitAnswer() {
  MutexLock lock(mutex_);
  while (sending_) ended_.Wait(mutex_);  // Bounded by the call's deadline.
}

void Heartbeats::Stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  AwaitAnswer();
}

}  // namespace ps
