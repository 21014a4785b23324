// The heartbeats that renew a member's lease and tell the chief which step it is at.
#pragma once

#include <chrono>
#include <string>

#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/client/chief_callbacks.h"
#include "worker/client/timer.h"

namespace ps {

// Thread-safe. Must not end before the timer was stopped.
class Heartbeats {
 public:
  // Stub and timer must outlive it. The callbacks are called from threads of gRPC.
  Heartbeats(v1::Chief::Stub& chief, Timer& timer, v1::Identity id, std::chrono::nanoseconds lease,
             ChiefCallbacks callbacks);

  // One every third of the lease from now on, until Stop, a refusal, or the job's end.
  void Start();
  // One as soon as may be, with an answer to a question that is asked now.
  void BeatNow();
  // No heartbeat begins any more; returns when the last one has ended, which its deadline makes certain.
  void Stop();

  // Returns when no heartbeat is under way, and what was answered has been dealt with.
  void AwaitAnswer();

  // The member begins this step. A step before the highest that was named changes nothing.
  void SetStep(uint64_t step);
  // As HeartbeatRequest.busy_with: told with the next heartbeat.
  void SetBusy(const std::string& what);

 private:
  struct Beat;
  void Schedule(TimePoint when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(uint64_t turn);
  void OnEnd(const grpc::Status& status, const v1::HeartbeatReply& reply);

  v1::Chief::Stub& chief_;
  Timer& timer_;
  const v1::Identity id_;
  const std::chrono::nanoseconds lease_;
  const ChiefCallbacks callbacks_;

  Mutex mutex_;
  CondVar ended_;
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string busy_with_ ABSL_GUARDED_BY(mutex_);
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;  // Of the heartbeat that is scheduled: one at a time is.
  bool sending_ ABSL_GUARDED_BY(mutex_) = false;
  bool again_ ABSL_GUARDED_BY(mutex_) = false;  // At once, when the one under way has ended.
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ps
