// The chief: the job's membership and phases. It grants initialisation, tells shards who takes part (views), and, in a
// synchronous mode with several shards, names the contributions of each step. Weights never pass through it.
//
// Thread-safe; nothing blocks. Calls out of it (to shards, to those who wait) are made without its lock, in order
// (Outbox). Time is passed in.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/outbox.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/membership.h"
#include "server/modes/mode.h"

namespace ps {

struct ChiefOptions {
  std::string job = "default";
  uint64_t generation = 1;  // Larger than any earlier start's of this job.
  uint32_t num_workers = 1;
  uint32_t num_shards = 1;
  std::string mode = "bsp";
  std::chrono::nanoseconds lease = std::chrono::seconds(10);
  // How long a member whose connection broke has to reconnect.
  std::chrono::nanoseconds reconnect_grace = std::chrono::seconds(1);
  // A running job that makes no step for this long fails.
  std::chrono::nanoseconds progress_timeout = std::chrono::minutes(10);
  int64_t max_shard_elements = INT64_MAX;       // Of a model that a server's memory holds.
  std::map<std::string, std::string> settings;  // Flags that all servers must share.
};

class Chief {
 public:
  using JoinCallback = std::function<void(absl::StatusOr<v1::JoinReply>)>;
  using DoneCallback = std::function<void(absl::StatusOr<v1::DoneReply>)>;
  using SendFunction = std::function<void(const v1::ChiefUpdate&)>;
  // Sends a member its state at each change; nothing: it is no longer a member.
  using WatchFunction = std::function<void(const std::optional<v1::HeartbeatReply>&)>;

  // `on_end` is called once, when the job is finished or failed (PHASE_FINISHED, PHASE_FAILED).
  Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end);

  // ---- Shards

  // A shard registers, or comes back. FAILED_PRECONDITION, naming the flags, if its settings differ; ALREADY_EXISTS if
  // its number is taken. From then on `send` gets every update, in order.
  absl::Status RegisterShard(const v1::Registration& registration, SendFunction send, TimePoint now);
  void OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now);
  // The stream of the shard broke.
  void OnShardGone(uint32_t shard, TimePoint now);

  // ---- Workers. Errors: FAILED_PRECONDITION (settings, layout or number of workers differ; named), ABORTED (the job
  // failed), ALREADY_EXISTS, INVALID_ARGUMENT, UNIMPLEMENTED (protocol version).

  // Calls back when the view with the new member is in force on every shard, or at the deadline with what is missing.
  // Returns a number for OnJoinGone; 0 if the join was refused.
  uint64_t Join(const v1::JoinRequest& request, TimePoint now, TimePoint deadline, JoinCallback callback);
  // The caller that waited for this join's answer disconnected: the member is suspect, unless it has retried.
  void OnJoinGone(uint64_t join, TimePoint now);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, TimePoint now);
  // A member opened its stream, on which it is sent its state at once and at each change. It replaces an earlier stream
  // of the member. Returns a number for OnWatchGone.
  absl::StatusOr<uint64_t> Watch(const v1::WatchRequest& request, TimePoint now, WatchFunction send);
  // The stream broke: its member is suspect.
  void OnWatchGone(uint64_t watch, TimePoint now);
  // Calls back when all workers are done and this one is the lead (the lowest rank), or the lead has left; or at the
  // deadline with who is waited for. ABORTED if the job fails.
  void Done(const v1::DoneRequest& request, TimePoint now, TimePoint deadline, DoneCallback callback);
  // Of the id; or of the join_request_id, where the worker never got to know its id: then OK also where nobody has it.
  absl::Status Leave(const v1::LeaveRequest& request, TimePoint now);

  v1::StatusReply Status(TimePoint now);
  // Whom the job waits for: always before it runs, then if no step was made for `longer`. Empty: for nobody.
  std::string LongWait(TimePoint now, std::chrono::nanoseconds longer);
  // Ends leases and waits whose time is over.
  void Tick(TimePoint now);
  // This server itself was suspended for this long (its process or its machine): leases are extended by as much, and
  // for the length of a lease no member is lost because its connection broke.
  void OnGap(std::chrono::nanoseconds gap, TimePoint now);
  // Makes the job fail for this reason (for example a shutdown). Does nothing if the job has ended.
  void Fail(const std::string& reason);

 private:
  struct ShardState {
    bool registered = false;
    bool ever_registered = false;
    std::string address;
    SendFunction send;
    uint64_t acknowledged_view = 0;
    bool initialised = false;
    uint64_t applied_version = 0;
    uint64_t highest_step = 0;
    std::string waiting_for;  // What an update on it has been waiting for, if for long; else empty.
    TimePoint gone_since;
  };
  struct JoinWait {
    uint64_t number;
    uint32_t rank;
    uint64_t incarnation;
    uint64_t view;
    TimePoint deadline;
    JoinCallback callback;
  };
  struct WatchState {
    struct Told {
      v1::Phase phase = v1::PHASE_UNSPECIFIED;
      bool initialise = false;
      bool lead = false;
      bool operator==(const Told&) const = default;
    };
    WatchFunction send;
    Told told;
  };
  struct DoneWait {
    uint32_t rank;
    uint64_t incarnation;
    TimePoint deadline;
    DoneCallback callback;
  };

  absl::Status Serving() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Member*> FindMember(const v1::Identity& id, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckMemory(const Layout& layout) const;
  absl::Status CheckSameJob(const v1::JoinRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t StartStep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answered when the view is in force.
  uint64_t AddJoin(const Member& member, uint64_t view, TimePoint deadline, JoinCallback callback)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Joining(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::JoinReply MakeJoinReply(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddShardInfo(google::protobuf::RepeatedPtrField<v1::ShardInfo>* shards) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountComplete(uint32_t shard, const v1::PushDone& done, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If the last member leaves before the job runs, model and experiment are reset.
  void RemoveMember(const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LoseMember(const Member& member, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetPhase(v1::Phase phase, const std::string& failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Chooses who initialises, starts or finishes the job if it is time, sends shards the new view, and answers the calls
  // that waited for it.
  void ViewChanged(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::View MakeView(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Broadcast(const v1::ChiefUpdate& update) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerJoins(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerDone(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The answer to a worker's Done call; nothing: it has to wait.
  std::optional<absl::StatusOr<v1::DoneReply>> DoneAnswer(const DoneWait& wait, TimePoint now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The state that the member is sent.
  v1::HeartbeatReply StateFor(const Member& member, TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLead(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellWatches(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckTimes(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WaitingFor(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<uint32_t> MissingShards() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether this rank is the one to send initial values, and every shard knows that it is.
  bool MayInitialise(uint32_t rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AllShardsInitialised() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ChiefOptions options_;
  const std::function<void(v1::Phase, const std::string&)> on_end_;
  bool leads_steps_ = false;  // Names the contributions of each step.

  Outbox outbox_;
  Mutex mutex_;
  Membership membership_ ABSL_GUARDED_BY(mutex_);
  v1::Phase phase_ ABSL_GUARDED_BY(mutex_) = v1::PHASE_GATHERING;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  uint64_t view_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<SlicePlan> plan_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> experiment_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint32_t> initialiser_ ABSL_GUARDED_BY(mutex_);
  uint64_t initialiser_view_ ABSL_GUARDED_BY(mutex_) = 0;  // The first view that names it.
  std::vector<ShardState> shards_ ABSL_GUARDED_BY(mutex_);
  // The first view with the present layout; what shards say of initial values before that is of an earlier one.
  uint64_t layout_view_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;    // All are done: the lead evaluates and saves, then all leave.
  bool lead_left_ ABSL_GUARDED_BY(mutex_) = false;    // In order, in that time.
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;  // Of joins and watches.
  std::map<uint64_t, WatchState> watches_ ABSL_GUARDED_BY(mutex_);
  TimePoint keep_suspects_until_ ABSL_GUARDED_BY(mutex_);
  std::list<JoinWait> joins_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> cancelled_joins_ ABSL_GUARDED_BY(mutex_);  // join_request_ids; such a join may arrive late.
  std::list<DoneWait> done_waits_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Mode> mode_ ABSL_GUARDED_BY(mutex_);
  // Pushes that some but not all shards have complete: (step, rank) → shards that have it.
  std::map<std::pair<uint64_t, uint32_t>, std::set<uint32_t>> complete_ ABSL_GUARDED_BY(mutex_);
  TimePoint last_progress_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
