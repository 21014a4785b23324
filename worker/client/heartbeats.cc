#include "worker/client/heartbeats.h"

#include <algorithm>
#include <utility>

#include <grpcpp/client_context.h>
#include "common/grpc_call.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kCallTime(10);
constexpr size_t kMaxBusyBytes = 256;  // Servers take no more.
constexpr std::chrono::seconds kReportEvery(1);
constexpr std::chrono::seconds kLastReportTime(2);

// Between a stream's end and the next one: at once the first time, so that a connection that was reset costs nothing.
constexpr std::chrono::milliseconds kReopen(100);

}  // namespace

struct Heartbeats::Beat {
  grpc::ClientContext context;
  v1::HeartbeatRequest request;
  v1::HeartbeatReply reply;
};

Heartbeats::Heartbeats(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, std::chrono::nanoseconds lease,
                       ChiefCallbacks callbacks, std::shared_ptr<const Traffic> traffic)
    : chief_(chief),
      timer_(timer),
      id_(std::move(id)),
      lease_(lease),
      callbacks_(std::move(callbacks)),
      traffic_(std::move(traffic)) {}

void Heartbeats::Start() {
  MutexLock lock(mutex_);
  started_ = true;
  Schedule(timer_.now() + lease_ / 3);
}

void Heartbeats::Schedule(TimePoint when) {
  next_at_ = when;
  timer_.At(when, [this, turn = ++turn_] { Send(turn, kCallTime); });
}

void Heartbeats::ScheduleReport() {
  if (!started_ || stopped_ || sending_ || !HasNews()) return;
  if (reported_at_.has_value() && next_at_ <= *reported_at_ + kReportEvery) return;  // Mostly: it is scheduled already.
  const TimePoint now = timer_.now();
  const TimePoint due = reported_at_.has_value() ? std::max(now, *reported_at_ + kReportEvery) : now;
  if (due < next_at_) Schedule(due);
}

void Heartbeats::TakesReports(bool takes) {
  MutexLock lock(mutex_);
  takes_reports_ = takes;
  ScheduleReport();
}

void Heartbeats::AddStep(const StepReport& step, uint64_t unix_ms) {
  MutexLock lock(mutex_);
  report_.AddStep(step, unix_ms);
  ScheduleReport();
}

// The first one is told a second later: by then a worker has told of its batches, if it does.
void Heartbeats::AddPush(uint64_t step, uint32_t samples) {
  MutexLock lock(mutex_);
  report_.AddPush(step, samples);
  if (!reported_at_.has_value()) reported_at_ = timer_.now();
  ScheduleReport();
}

void Heartbeats::AddEvaluation(const EvaluationReport& evaluation) {
  MutexLock lock(mutex_);
  report_.AddEvaluation(evaluation);
  ScheduleReport();
}

void Heartbeats::SetDevice(const std::string& device) {
  MutexLock lock(mutex_);
  report_.SetDevice(device);
}

void Heartbeats::ReportNow() {
  MutexLock lock(mutex_);
  if (!started_ || stopped_ || !HasNews()) return;
  if (sending_) {
    again_ = true;
  } else {
    Schedule(timer_.now());
  }
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

void Heartbeats::CountLocalStep() {
  MutexLock lock(mutex_);
  ++local_steps_;
}

void Heartbeats::SetBusy(const std::string& what) {
  MutexLock lock(mutex_);
  busy_with_ = Printable(what, kMaxBusyBytes);
}

void Heartbeats::Send(uint64_t turn, std::chrono::nanoseconds longest) {
  auto beat = std::make_shared<Beat>();
  SetDeadline(beat->context, std::min(longest, lease_));
  *beat->request.mutable_id() = id_;
  {
    MutexLock lock(mutex_);
    if (stopped_ || sending_ || turn != turn_) return;
    beat->request.set_step(step_);
    beat->request.set_local_steps(local_steps_);
    beat->request.set_busy_with(busy_with_);
    if (HasNews()) AddReport(beat->request);
    sending_ = true;
  }
  chief_.async()->Heartbeat(&beat->context, &beat->request, &beat->reply,
                            [this, beat](const grpc::Status& status) { OnEnd(status, *beat); });
}

void Heartbeats::AddReport(v1::HeartbeatRequest& request) {
  v1::WorkerReport& report = *request.mutable_report();
  report = report_.Take();
  if (traffic_ != nullptr) {
    report.set_sent_bytes(traffic_->sent());
    report.set_received_bytes(traffic_->received());
    report.set_link(traffic_->links());
  }
  reported_at_ = timer_.now();
}

// A second after it was sent the next report was due, and so on; the last of those is sent now.
void Heartbeats::ReportEnded(const grpc::Status& status, const Beat& beat) {
  if (!beat.request.has_report()) return;
  if (report_.has_news()) {
    const auto due = (timer_.now() - *reported_at_) / kReportEvery;
    if (due > 1) report_.CountDropped(static_cast<uint64_t>(due - 1));
  }
  if (!status.ok()) report_.TakeBack();
}

void Heartbeats::OnEnd(const grpc::Status& status, const Beat& beat) {
  const v1::HeartbeatReply& reply = beat.reply;
  const bool refused = status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
  const bool over = status.ok() && JobIsOver(reply);
  if (refused) callbacks_.on_refused(FromGrpc(status));
  if (status.ok()) callbacks_.on_state(reply);
  MutexLock lock(mutex_);
  // Under the lock: once Stop has seen that nothing is being sent, nothing is scheduled any more.
  ReportEnded(status, beat);
  if (status.ok()) takes_reports_ = reply.takes_reports();
  if (refused || over) takes_reports_ = false;
  sending_ = false;
  const auto pause = std::exchange(again_, false) ? std::chrono::nanoseconds(0) : lease_ / 3;
  if (!refused && !over && !stopped_) {
    Schedule(timer_.now() + pause);
    ScheduleReport();
  }
  ended_.NotifyAll();
}

void Heartbeats::AwaitAnswer() {
  MutexLock lock(mutex_);
  while (sending_) ended_.Wait(mutex_);  // Bounded by the call's deadline.
}

void Heartbeats::StopAfterReport() {
  uint64_t turn = 0;
  {
    MutexLock lock(mutex_);
    while (sending_) ended_.Wait(mutex_);  // Bounded by the call's deadline.
    if (started_ && !stopped_ && HasNews()) turn = ++turn_;
  }
  if (turn != 0) Send(turn, kLastReportTime);
  Stop();
}

void Heartbeats::Stop() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  AwaitAnswer();
}

// Shared by the owner and the stream under way.
struct ChiefWatch::State {
  v1::Chief::Stub& chief;
  Timer& timer;
  const v1::Identity id;
  const ChiefCallbacks callbacks;
  Mutex mutex;
  CondVar changed;
  std::shared_ptr<Stream> stream ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  bool open ABSL_GUARDED_BY(mutex) = false;
};

class ChiefWatch::Stream final : public grpc::ClientReadReactor<v1::HeartbeatReply> {
 public:
  explicit Stream(std::shared_ptr<State> state) : state_(std::move(state)) { *request_.mutable_id() = state_->id; }

  void Begin() {
    context_.set_wait_for_ready(true);
    state_->chief.async()->Watch(&context_, &request_, this);
    StartRead(&reply_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;  // OnDone says why.
    told_ = true;
    {
      MutexLock lock(state_->mutex);
      state_->open = true;
    }
    state_->callbacks.on_state(reply_);
    StartRead(&reply_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<State> state = state_;
    std::shared_ptr<Stream> self;  // Let go of last, without the lock.
    const bool told = told_;
    const bool refused = status.error_code() == grpc::StatusCode::FAILED_PRECONDITION ||
                         status.error_code() == grpc::StatusCode::ABORTED;
    if (refused) state->callbacks.on_refused(FromGrpc(status));
    if (status.ok() && state->callbacks.on_closed) state->callbacks.on_closed();
    // Ended in order: it is no member any more. UNIMPLEMENTED: a chief without this call; heartbeats have to do.
    const bool over = refused || status.ok() || status.error_code() == grpc::StatusCode::UNIMPLEMENTED;
    MutexLock lock(state->mutex);
    state->open = false;
    // Under the lock: as soon as the owner sees that there is no stream, the timer may go.
    if (!over && !state->stopping)
      state->timer.At(state->timer.now() + (told ? std::chrono::milliseconds(0) : kReopen), [state] { Open(state); });
    self = std::move(state->stream);
    state->stream = nullptr;
    state->changed.NotifyAll();
  }

 private:
  const std::shared_ptr<State> state_;
  grpc::ClientContext context_;
  v1::WatchRequest request_;
  v1::HeartbeatReply reply_;
  bool told_ = false;
};

ChiefWatch::ChiefWatch(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, ChiefCallbacks callbacks)
    : state_(new State{.chief = chief,
                       .timer = timer,
                       .id = std::move(id),
                       .callbacks = std::move(callbacks),
                       .mutex = {},
                       .changed = {},
                       .stream = nullptr}) {}

void ChiefWatch::Open(const std::shared_ptr<State>& state) {
  const auto stream = std::make_shared<Stream>(state);
  {
    MutexLock lock(state->mutex);
    if (state->stopping) return;
    state->stream = stream;
  }
  stream->Begin();
}

void ChiefWatch::Start() { Open(state_); }

void ChiefWatch::Stop() {
  MutexLock lock(state_->mutex);
  state_->stopping = true;
  if (state_->stream != nullptr) state_->stream->Cancel();
  while (state_->stream != nullptr) state_->changed.Wait(state_->mutex);
}

bool ChiefWatch::open() const {
  MutexLock lock(state_->mutex);
  return state_->open;
}

}  // namespace ps
