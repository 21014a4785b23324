// The heartbeats that renew a member's lease, and tell the chief which step it is at and how its training gets on.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "ps/v1/ps.pb.h"
#include "worker/client/timer.h"
#include "worker/client/training_report.h"
#include "worker/link/traffic.h"

namespace ps {

// What a member is told by its chief, on the stream that it keeps open and in the answers to its heartbeats.

// Called from threads of gRPC; they must not block.
struct ChiefCallbacks {
  std::function<void(const v1::HeartbeatReply&)> on_state;
  // The chief refused it for good: the rank has another owner, or the job is over.
  std::function<void(const absl::Status&)> on_refused;
  // The chief has closed the stream in order. May be empty.
  std::function<void()> on_closed = {};
};

// No state follows this one: the job has ended, or its generation.
inline bool JobIsOver(const v1::HeartbeatReply& state) {
  const bool ended = state.phase() != v1::PHASE_GATHERING && state.phase() != v1::PHASE_RUNNING;
  return ended || state.generation() != 0;
}

// Thread-safe. Must not end before the timer was stopped.
class Heartbeats {
 public:
  // Stub and timer must outlive it. The callbacks are called from threads of gRPC. Reports tell of `traffic`, if any.
  Heartbeats(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, std::chrono::nanoseconds lease,
             ChiefCallbacks callbacks, std::shared_ptr<const Traffic> traffic = nullptr);

  // One every third of the lease from now on, until Stop, a refusal, or the job's end.
  void Start();
  // One as soon as may be, with an answer to a question that is asked now.
  void BeatNow();
  // No heartbeat begins any more; returns when the last one has ended, which its deadline makes certain.
  void Stop();
  // The same, but what the chief has not been told of the training it is told first, if that takes no longer than two
  // seconds.
  void StopAfterReport();

  // Returns when no heartbeat is under way, and what was answered has been dealt with.
  void AwaitAnswer();

  // The member begins this step. A step before the highest that was named changes nothing.
  void SetStep(uint64_t step);
  // The member has taken a step of its own (HeartbeatRequest.local_steps).
  void CountLocalStep();
  // The next heartbeat tells it (HeartbeatRequest.busy_with).
  void SetBusy(const std::string& what);

  // The chief takes reports, or takes none. As long as it takes them, and there is news, a heartbeat with a report
  // follows the one before after a second. Heartbeats' own answers need not be told.
  void TakesReports(bool takes);
  // What reports tell of. None of these waits.
  void AddStep(const StepReport& step, uint64_t unix_ms);
  void AddPush(uint64_t step, uint32_t samples);
  void AddEvaluation(const EvaluationReport& evaluation);
  void SetDevice(const std::string& device);
  // The news is told now, if there is any, though the last report may be less than a second ago.
  void ReportNow();

 private:
  struct Beat;
  void Schedule(TimePoint when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return takes_reports_ && report_.has_news(); }
  // There may be news: its report is due.
  void ScheduleReport() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(uint64_t turn, std::chrono::nanoseconds longest);
  void AddReport(v1::HeartbeatRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnEnd(const grpc::Status& status, const Beat& beat);
  // Whether the report of a heartbeat that has ended was told, and what was not told meanwhile.
  void ReportEnded(const grpc::Status& status, const Beat& beat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  v1::Chief::Stub& chief_;
  Timer& timer_;
  const v1::Identity id_;
  const std::chrono::nanoseconds lease_;
  const ChiefCallbacks callbacks_;
  const std::shared_ptr<const Traffic> traffic_;

  Mutex mutex_;
  CondVar ended_;
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t local_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string busy_with_ ABSL_GUARDED_BY(mutex_);
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;  // Numbers the heartbeat that is scheduled: one at a time is.
  bool sending_ ABSL_GUARDED_BY(mutex_) = false;
  bool again_ ABSL_GUARDED_BY(mutex_) = false;  // At once, when the one under way has ended.
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  TimePoint next_at_ ABSL_GUARDED_BY(mutex_);  // When the one that is scheduled begins.
  TrainingReport report_ ABSL_GUARDED_BY(mutex_);
  bool takes_reports_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<TimePoint> reported_at_ ABSL_GUARDED_BY(mutex_);  // When the last report was sent.
};

// The stream that a member keeps open to the chief: it breaks when the member dies, so the chief notices at once, and
// on it the chief sends every change at once (proto/ps/v1/ps.proto, Chief.Watch).

// Thread-safe, but Start and Stop are its owner's.
class ChiefWatch {
 public:
  // Stub and timer must outlive it.
  ChiefWatch(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, ChiefCallbacks callbacks);
  ~ChiefWatch() { Stop(); }

  void Start();
  // Cancels the stream and waits for its end, which gRPC brings at once.
  void Stop();
  // The stream that is open now has received a state.
  bool open() const;

 private:
  class Stream;
  struct State;
  static void Open(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace ps
