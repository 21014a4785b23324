// The chief: the job's membership and phases. It grants initialisation, tells shards who takes part (views), and, where
// all shards must apply the same contributions, names those of each step. Weights never pass through it.
//
// clang-format off
//   JobState       what is, and what follows from an event: pure (Membership, ShardTable, JobTerms, StepCoordinator)
//   WaitingCalls   joins, requests for a run and ends that are not answered yet
//   CutCoordinator a change of hyperparameters that is under way
//   MemberStreams  what each member was told last
//   Chief          the lock around them, and the calls out
// clang-format on
//
// Thread-safe; nothing blocks. Calls out of it (to shards, to those who wait) are made without its lock, in order
// (Outbox). Time is passed in.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "common/line_writer.h"
#include "common/metrics.h"
#include "common/outbox.h"
#include "common/sync.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/checkpoint_rounds.h"
#include "server/chief/cut_coordinator.h"
#include "server/chief/job_state.h"
#include "server/chief/member_streams.h"
#include "server/chief/shard_streams.h"
#include "server/chief/waiting_calls.h"

namespace ps {

class Chief {
 public:
  using JoinCallback = WaitingCalls<v1::JoinReply>::Callback;
  using DoneCallback = WaitingCalls<v1::DoneReply>::Callback;
  using SetCallback = std::function<void(absl::StatusOr<v1::SetHyperparametersReply>)>;
  using TakeRunCallback = WaitingCalls<v1::TakeRunReply>::Callback;
  using SendFunction = ShardStreams::SendFunction;
  using WatchFunction = MemberStreams::SendFunction;
  using CheckpointCallback = std::function<void(absl::StatusOr<v1::CheckpointReply>)>;

  // What the chief calls on its server, where checkpoints are taken. The calls are made without the lock.
  struct CheckpointCalls {
    // Makes a checkpoint complete; then `committed` is called, from any thread.
    std::function<void(Manifest manifest, std::function<void(absl::Status)> committed)> commit;
    // The folder of the checkpoint with this number.
    std::function<std::string(uint64_t)> path_of;
    // Called once: this generation is over, and the job goes on as another, which is to be higher than `heard_of` and
    // not to begin with `damaged`, the path of a checkpoint, unless that is empty.
    std::function<void(const std::string& reason, const std::string& damaged, uint64_t heard_of)> roll_back;
  };

  // `on_end` is called when the job is finished or failed (PHASE_FINISHED, PHASE_FAILED), and when it is shut down.
  // `metrics` gets the runs that are handed out and come back; null: these are not recorded.
  Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end,
        MetricsWriter* metrics = nullptr, CheckpointCalls checkpoint_calls = {});

  // ---- Shards

  // A shard registers, or comes back. From then on `send` gets every update, in order; where its process resumes a
  // stream, first those that it has not received. Another process in the place of one with which a part of the weights
  // went ends this generation, where checkpoints are taken: UNAVAILABLE. Other errors are of ShardTable::Check and
  // Register; NOT_FOUND if there is no such stream. Returns a number for OnShardGone.
  absl::StatusOr<uint64_t> RegisterShard(const v1::Registration& registration, SendFunction send, TimePoint now);
  void OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now);
  // This connection of the shard broke.
  void OnShardGone(uint32_t shard, uint64_t connection, TimePoint now);

  // ---- Workers. Errors: FAILED_PRECONDITION (settings, layout or number of workers differ; named), ABORTED (the job
  // failed), ALREADY_EXISTS, INVALID_ARGUMENT, UNIMPLEMENTED (protocol version).

  // Calls back when the view with the new member is in force on every shard, or at the deadline with what is missing.
  // Returns a number for OnJoinGone; 0 if the join was refused.
  uint64_t Join(const v1::JoinRequest& request, TimePoint now, TimePoint deadline, JoinCallback callback);
  absl::StatusOr<v1::WorkerFlagsReply> FlagsFor(const v1::WorkerFlagsRequest& request);
  // The caller that waited for this join's answer disconnected: the member is suspect, unless it has retried. Nothing
  // if it is answered.
  void OnJoinGone(uint64_t join, TimePoint now);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, TimePoint now);
  // A member opened its stream, on which it is sent its state at once and at each change. It replaces an earlier stream
  // of the member. Returns a number for OnWatchGone.
  absl::StatusOr<uint64_t> Watch(const v1::WatchRequest& request, TimePoint now, WatchFunction send);
  // The stream broke: its member is suspect. Nothing for 0.
  void OnWatchGone(uint64_t watch, TimePoint now);
  // Calls back when all workers are done and this one is the lead (the lowest rank), or the lead has left; or at the
  // deadline with who is waited for. ABORTED if the job fails. A member has one such call; a new one ends the old.
  void Done(const v1::DoneRequest& request, TimePoint now, TimePoint deadline, DoneCallback callback);
  // Calls back with the member's next run of samples, or that all are used; or, at the deadline or if runs of its own
  // are not finished, that it has to ask again. A member has one such call; a new one ends the old. Errors are of
  // JobState::OnTakeRun and TakeRun.
  void TakeRun(const v1::TakeRunRequest& request, TimePoint now, TimePoint deadline, TakeRunCallback callback);
  // The member with the id leaves; or the one with the join_request_id, where the worker never got to know its id: then
  // OK also where nobody has it.
  absl::Status Leave(const v1::LeaveRequest& request, TimePoint now);

  // ---- Operators

  // Changes hyperparameters on all shards, at one version (Cut, in ps.proto). Calls back with it once every shard has
  // taken the change over, or at the deadline: DEADLINE_EXCEEDED, with the shard, and the rank and step that are waited
  // for. INVALID_ARGUMENT, with all that is wrong, FAILED_PRECONDITION or ABORTED if the job does not run,
  // RESOURCE_EXHAUSTED, naming it, while another change is under way; with these nothing is changed.
  void SetHyperparameters(const v1::SetHyperparametersRequest& request, TimePoint now, TimePoint deadline,
                          SetCallback callback);

  // Takes a checkpoint that begins from now on, and calls back when it is complete; or at the deadline with what is
  // waited for. FAILED_PRECONDITION if none are taken, or the job does not run; RESOURCE_EXHAUSTED if too many ask.
  void Checkpoint(TimePoint now, TimePoint deadline, CheckpointCallback callback);

  // Asks a worker to leave, by name or rank. Errors are of JobState::Drain.
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainRequest& request, TimePoint now);

  // Ends the job, also one that has ended and is served on (--keep_running). Errors are of JobState::ShutDown.
  absl::StatusOr<v1::ShutdownReply> ShutDown(TimePoint now);

  v1::StatusReply Status(TimePoint now, bool with_layout = false);
  // The job failed since gradients, weights or state were not finite.
  bool not_finite() {
    MutexLock lock(mutex_);
    return job_.not_finite();
  }
  // Whom the job waits for: before it runs always, afterwards only if no step was made for `longer`. Empty: for nobody.
  std::string LongWait(TimePoint now, std::chrono::nanoseconds longer);
  // Ends leases and waits whose time is over.
  void Tick(TimePoint now);
  // This server itself was suspended for this long (its process or its machine): leases are extended by as much, and
  // for the length of a lease no member is lost because its connection broke.
  void OnGap(std::chrono::nanoseconds gap, TimePoint now);
  // Makes the job fail for this reason (for example a shutdown). Does nothing if the job has ended.
  void Fail(const std::string& reason, TimePoint now);
  // This server leaves a job that takes checkpoints: the others wait for it to come back. Does nothing if the job, or
  // this generation of it, has ended.
  void Supersede(const std::string& reason, TimePoint now);

 private:
  using JoinAnswer = std::optional<absl::StatusOr<v1::JoinReply>>;
  using TakeRunAnswer = std::optional<absl::StatusOr<v1::TakeRunReply>>;
  using DoneAnswer = std::optional<absl::StatusOr<v1::DoneReply>>;

  // Whether the job has what the shard needs and knows: FAILED_PRECONDITION, naming --checkpoint_dir, if not.
  absl::Status CheckCheckpoints(const v1::Registration& registration) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether there is a stream that this registration resumes.
  absl::Status CheckResumes(const v1::Registration& registration) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // By what a shard that registers anew says, the present generation may be over.
  void EndIfLost(const v1::Registration& registration, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After an event that calls for a new view: sends it to the shards, and answers and tells whom it concerns.
  void ChangeView(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Broadcast(const v1::ChiefUpdate& update) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { shards_.Broadcast(update); }
  void TellCut(const v1::Cut& cut) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Carries out what a cut has come to.
  void MoveCut(const CutCoordinator::Outcome& outcome) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerSet(const absl::StatusOr<v1::SetHyperparametersReply>& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Begins the change that waits for a checkpoint's cut to end, or ends its wait.
  void MoveSet(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- Checkpoints (chief_checkpoint.cc)

  bool takes_checkpoints() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return job_.options().checkpoints.has_value();
  }
  // Begins what is due.
  void MoveCheckpoint(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginCheckpoint(bool at_once, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCheckpointWritten(uint32_t shard, const v1::CheckpointWritten& written, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CommitCheckpoint(const std::vector<v1::CheckpointWritten>& parts, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCommitted(uint64_t number, const absl::Status& committed);
  // The checkpoint that is under way has come to this.
  void EndCheckpoint(const absl::Status& status, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job, or this generation of it, is over.
  void AbandonCheckpoint() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerAsked(uint64_t number, const absl::StatusOr<v1::CheckpointReply>& reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The workers are done, and their last checkpoint is complete, or cannot be.
  bool finished_saving() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !takes_checkpoints() || saved_the_end_; }
  std::string WaitingForLastCheckpoint() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RollBack(const std::string& reason, TimePoint now, const std::string& damaged = "", uint64_t heard_of = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  v1::CheckpointStatus CheckpointsStatus(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void AnswerJoins(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AnswerDones(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Answers calls of TakeRun, and records what was dealt and returned.
  void AnswerTakes(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing: the call has to wait.
  JoinAnswer AnswerTo(const WaitingCalls<v1::JoinReply>::Call& join, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  TakeRunAnswer AnswerTo(const WaitingCalls<v1::TakeRunReply>::Call& take, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  DoneAnswer AnswerTo(const WaitingCalls<v1::DoneReply>::Call& done, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndGeneration(const std::string& reason, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<void(v1::Phase, const std::string&)> on_end_;
  MetricsWriter* const metrics_;

  CallOutbox outbox_{MakeCall};
  Mutex mutex_;  // Before the outbox's lock.
  JobState job_ ABSL_GUARDED_BY(mutex_);
  ShardStreams shards_ ABSL_GUARDED_BY(mutex_);
  WaitingCalls<v1::JoinReply> joins_ ABSL_GUARDED_BY(mutex_);
  WaitingCalls<v1::DoneReply> dones_ ABSL_GUARDED_BY(mutex_);
  WaitingCalls<v1::TakeRunReply> takes_ ABSL_GUARDED_BY(mutex_);  // Their numbers are those of the requests.
  MemberStreams streams_ ABSL_GUARDED_BY(mutex_);
  CutCoordinator cut_ ABSL_GUARDED_BY(mutex_);
  SparingLines refused_joins_ ABSL_GUARDED_BY(mutex_);
  // The change that is under way, and who asked for it; empty: none.
  JobState::Setting setting_ ABSL_GUARDED_BY(mutex_);
  SetCallback set_callback_ ABSL_GUARDED_BY(mutex_);
  TimePoint set_deadline_ ABSL_GUARDED_BY(mutex_);
  bool set_begun_ ABSL_GUARDED_BY(mutex_) = false;

  // The checkpoint that is under way, and who waits for it or for the next.
  struct AskedFor {
    uint64_t number = 0;  // 0: the next.
    TimePoint deadline;
    CheckpointCallback callback;
  };
  const CheckpointCalls checkpoint_calls_;
  CheckpointRounds rounds_ ABSL_GUARDED_BY(mutex_);
  Manifest manifest_ ABSL_GUARDED_BY(mutex_);
  v1::SavedJob saved_job_ ABSL_GUARDED_BY(mutex_);  // The job as it was at the cut.
  TimePoint checkpoint_began_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> checkpoint_version_ ABSL_GUARDED_BY(mutex_);  // It is to be of this, if that was named.
  std::deque<uint64_t> kept_ ABSL_GUARDED_BY(mutex_);                   // Numbers of those that are complete.
  std::vector<AskedFor> asked_ ABSL_GUARDED_BY(mutex_);
  std::string checkpoint_path_ ABSL_GUARDED_BY(mutex_);     // The last one that is complete has it.
  std::string checkpoint_failure_ ABSL_GUARDED_BY(mutex_);  // Why the last one failed, if it did.
  // The last checkpoint is complete, or was tried for as long as --server_timeout; when its first attempt began; and
  // whether that has failed.
  bool saved_the_end_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<TimePoint> finishing_since_ ABSL_GUARDED_BY(mutex_);
  bool tried_the_end_ ABSL_GUARDED_BY(mutex_) = false;
  bool superseded_ ABSL_GUARDED_BY(mutex_) = false;   // This generation is over.
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;  // Joins and watches have numbers.
  v1::Phase told_end_ ABSL_GUARDED_BY(mutex_) = v1::PHASE_UNSPECIFIED;
};

}  // namespace ps
