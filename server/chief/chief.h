// The chief: ChiefCore behind a lock. An event goes in under the lock, and what is to be done because of it is done
// without it, in order (Outbox).
//
// Thread-safe; nothing blocks. Each event is the core's of the same name, which says what it does. Where the core takes
// a number, this takes the function that listens: called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/base/outbox.h"
#include "server/base/unix_time.h"
#include "server/chief/chief_action.h"
#include "server/chief/chief_core.h"

namespace ps {

class Chief {
 public:
  using SendFunction = std::function<void(const v1::ChiefUpdate&)>;
  // Nothing: the stream ends.
  using WatchFunction = std::function<void(const std::optional<v1::HeartbeatReply>&)>;
  template <typename Reply>
  using Callback = std::function<void(const absl::StatusOr<Reply>&)>;

  // What the chief calls on its server, where checkpoints are taken.
  struct CheckpointCalls {
    // Makes a checkpoint complete; then `committed` is called, from any thread.
    std::function<void(Manifest manifest, std::function<void(absl::Status)> committed)> commit;
    std::function<void(const RollBack&)> roll_back;
  };

  // `on_end` is called when the job is finished or failed (PHASE_FINISHED, PHASE_FAILED), and when it is shut down.
  // `metrics` gets checkpoints, and the runs that are handed out and come back; null: these are not recorded.
  Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end,
        MetricsWriter* metrics = nullptr, CheckpointCalls checkpoint_calls = {});

  // ---- Shards

  // Returns a number for OnShardGone.
  absl::StatusOr<uint64_t> RegisterShard(const v1::Registration& registration, SendFunction send, TimePoint now) {
    return Open(&ChiefCore::RegisterShard, std::move(send), registration, now);
  }
  void OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now) {
    Do(&ChiefCore::OnReport, shard, report, now);
  }
  void OnWaits(const RankWait& waits) { Do(&ChiefCore::OnWaits, waits); }
  void OnShardGone(uint32_t shard, uint64_t connection, TimePoint now) {
    Do(&ChiefCore::OnShardGone, shard, connection, now);
    Take<SendFunction>(connection);
  }

  // ---- Workers

  // Returns a number for OnJoinGone; 0 if the join was refused.
  uint64_t Join(const v1::JoinRequest& request, TimePoint now, TimePoint deadline, Callback<v1::JoinReply> callback) {
    return Do(&ChiefCore::Join, Listen(std::move(callback)), request, now, deadline);
  }
  void OnJoinGone(uint64_t join, TimePoint now) { Do(&ChiefCore::OnJoinGone, join, now); }
  absl::StatusOr<bool> OfferLayout(const std::string& hash) { return Do(&ChiefCore::OfferLayout, hash); }
  void OnLayout(const std::string& hash, const std::shared_ptr<const Layout>& layout) {
    Do(&ChiefCore::OnLayout, hash, layout);
  }
  absl::StatusOr<v1::WorkerFlagsReply> FlagsFor(const v1::WorkerFlagsRequest& request) {
    return Read(&ChiefCore::FlagsFor, request);
  }
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, TimePoint now) {
    return Do(&ChiefCore::Heartbeat, request, now);
  }
  // Returns a number for OnWatchGone.
  absl::StatusOr<uint64_t> Watch(const v1::WatchRequest& request, TimePoint now, WatchFunction send) {
    return Open(&ChiefCore::Watch, std::move(send), request, now);
  }
  void OnWatchGone(uint64_t watch, TimePoint now) {
    Do(&ChiefCore::OnWatchGone, watch, now);
    Take<WatchFunction>(watch);
  }
  void Done(const v1::DoneRequest& request, TimePoint now, TimePoint deadline, Callback<v1::DoneReply> callback) {
    Do(&ChiefCore::Done, Listen(std::move(callback)), request, now, deadline);
  }
  void TakeRun(const v1::TakeRunRequest& request, TimePoint now, TimePoint deadline,
               Callback<v1::TakeRunReply> callback) {
    Do(&ChiefCore::TakeRun, Listen(std::move(callback)), request, now, deadline);
  }
  void Reduce(const v1::ReduceRequest& request, TimePoint now, TimePoint deadline, Callback<v1::ReduceReply> callback) {
    Do(&ChiefCore::Reduce, Listen(std::move(callback)), request, now, deadline);
  }
  absl::Status Leave(const v1::LeaveRequest& request, TimePoint now) { return Do(&ChiefCore::Leave, request, now); }

  // ---- Operators

  void SetHyperparameters(const v1::SetHyperparametersRequest& request, TimePoint now, TimePoint deadline,
                          Callback<v1::SetHyperparametersReply> callback) {
    Do(&ChiefCore::SetHyperparameters, Listen(std::move(callback)), request, now, deadline);
  }
  void Checkpoint(TimePoint now, TimePoint deadline, Callback<v1::CheckpointReply> callback) {
    Do(&ChiefCore::Checkpoint, Listen(std::move(callback)), now, deadline);
  }
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainRequest& request, TimePoint now) {
    return Do(&ChiefCore::Drain, request, now);
  }
  absl::StatusOr<v1::ShutdownReply> ShutDown(TimePoint now) { return Do(&ChiefCore::ShutDown, now); }
  v1::StatusReply Status(TimePoint now, bool with_layout = false) {
    v1::StatusReply status = Read(&ChiefCore::Status, now, with_layout);
    status.mutable_progress()->set_unix_ms(UnixMs());
    return status;
  }

  // ---- The server

  bool not_finite() { return Read(&ChiefCore::not_finite); }
  JobCounts counts() { return Read(&ChiefCore::counts); }
  // Whether every shard has heard of what is: of the job's end, if it has ended.
  bool all_shards_know() { return Read(&ChiefCore::all_shards_know); }
  std::string LongWait(TimePoint now, std::chrono::nanoseconds longer) {
    return Read(&ChiefCore::LongWait, now, longer);
  }
  void Tick(TimePoint now) { Do(&ChiefCore::Tick, now); }
  void OnGap(std::chrono::nanoseconds gap, TimePoint now) { Do(&ChiefCore::OnGap, gap, now); }
  void Fail(const std::string& reason, TimePoint now) { Do(&ChiefCore::Fail, reason, now); }
  void Supersede(const std::string& reason, TimePoint now) { Do(&ChiefCore::Supersede, reason, now); }

 private:
  using Listener = std::variant<SendFunction, WatchFunction, Callback<v1::JoinReply>, Callback<v1::DoneReply>,
                                Callback<v1::TakeRunReply>, Callback<v1::ReduceReply>,
                                Callback<v1::SetHyperparametersReply>, Callback<v1::CheckpointReply>>;

  // Tells the core an event, and does what is to be done, unless another thread is at it, which then does this too.
  template <typename Result, typename... Params, typename... Args>
  Result Do(Result (ChiefCore::*event)(Params...), const Args&... args) {
    const OutboxLock lock(outbox_, mutex_);
    const absl::Cleanup post = [this] {
      mutex_.AssertHeld();
      outbox_.Add(core_.TakeActions());
    };
    return (core_.*event)(args...);
  }
  template <typename Result, typename... Params, typename... Args>
  Result Read(Result (ChiefCore::*question)(Params...) const, const Args&... args) {
    MutexLock lock(mutex_);
    return (core_.*question)(args...);
  }
  // Does what Do does, for an event that takes the number of a listener. If it is refused, nobody listens.
  template <typename Event, typename Function, typename... Args>
  absl::StatusOr<uint64_t> Open(Event event, Function listener, const Args&... args) {
    const uint64_t number = Listen(std::move(listener));
    const absl::Status opened = Do(event, number, args...);
    if (opened.ok()) return number;
    Take<Function>(number);
    return opened;
  }

  // Returns the number by which the core knows this one.
  uint64_t Listen(Listener listener) {
    MutexLock lock(mutex_);
    listeners_[++last_number_] = std::move(listener);
    return last_number_;
  }
  // Who listens by this number, and, unless it stays, does no longer; null: nobody does.
  template <typename Function>
  Function Take(uint64_t number, bool stays = false) {
    MutexLock lock(mutex_);
    const auto found = listeners_.find(number);
    if (found == listeners_.end()) return nullptr;
    Function listener = std::get<Function>(found->second);
    if (!stays) listeners_.erase(found);
    return listener;
  }

  struct Performer;  // Does one action.

  const std::function<void(v1::Phase, const std::string&)> on_end_;
  MetricsWriter* const metrics_;
  const CheckpointCalls checkpoint_calls_;

  Outbox<ChiefAction> outbox_;
  Mutex mutex_;  // It is locked before the outbox's.
  ChiefCore core_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Listener> listeners_ ABSL_GUARDED_BY(mutex_);  // Listen gives the key.
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ps
