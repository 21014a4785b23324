// What the chief decides: the job's membership and phases. It grants initialisation, tells shards who takes part
// (views), and, where all shards must apply the same contributions, names those of each step. Weights never pass
// through it.
//
// clang-format off
//   JobState       what is, and what follows from an event (Membership, ShardTable, JobTerms, StepCoordinator)
//   Standbys       joins that wait for a rank
//   WaitingCalls   joins, requests for a run, reductions, ends and requests for a checkpoint that are not answered yet
//   CutCoordinator a change of hyperparameters, or a checkpoint's cut, that is under way
//   ShardStreams   what shards were told, and have not received yet
// clang-format on
//
// A deterministic core: no locks, no I/O, no clock, no callbacks. An event goes in, with the time, and what is to be
// done because of it comes out (TakeActions). Its owner chooses numbers, none twice, for connections of shards, for
// streams of members and for calls, and these are what actions name.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "common/line_writer.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/checkpoint_rounds.h"
#include "server/chief/chief_action.h"
#include "server/chief/cut_coordinator.h"
#include "server/chief/job_state.h"
#include "server/chief/shard_streams.h"
#include "server/chief/standbys.h"
#include "server/chief/waiting_calls.h"

namespace ps {

class ChiefCore {
 public:
  ChiefCore(const ChiefOptions& options, TimePoint now);

  // What is to be done because of the events since the last call, in order.
  std::vector<ChiefAction> TakeActions() { return std::exchange(actions_, {}); }

  // ---- Shards

  // A shard registers, or comes back. From then on this connection gets every update, in order; where its process
  // resumes a stream, first those that it has not received. Another process in the place of one with which a part of
  // the weights went ends this generation, where checkpoints are taken: UNAVAILABLE. Other errors are of
  // ShardTable::Check and Register; NOT_FOUND if there is no such stream.
  absl::Status RegisterShard(uint64_t connection, const v1::Registration& registration, TimePoint now);
  void OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now);
  // Shard 0 has seen whom calls wait for, where each shard decides for itself. For who watches the job.
  void OnWaits(const RankWait& waits) { job_.progress().OnWaits(waits); }
  // This connection of the shard broke.
  void OnShardGone(uint32_t shard, uint64_t connection, TimePoint now);

  // ---- Workers. Errors: FAILED_PRECONDITION (settings, layout or number of workers differ; named), ABORTED (the job
  // failed), ALREADY_EXISTS, INVALID_ARGUMENT, UNIMPLEMENTED (protocol version).

  // Answered when the view with the new member is in force on every shard, or at the deadline with what is missing.
  // Where workers come and go and no rank is free, it waits for one first, as one of --max_standbys. Returns the call's
  // number; 0 if the join was refused.
  uint64_t Join(uint64_t call, const v1::JoinRequest& request, TimePoint now, TimePoint deadline);
  // A worker is about to tell the layout with this hash; results and errors are those of ToldLayouts::Offer. OnLayout
  // follows unless it returns true: with the layout, or with null if the worker has not told it.
  absl::StatusOr<bool> OfferLayout(const std::string& hash) { return job_.told_layouts().Offer(hash); }
  void OnLayout(const std::string& hash, std::shared_ptr<const Layout> layout);
  absl::StatusOr<v1::WorkerFlagsReply> FlagsFor(const v1::WorkerFlagsRequest& request) const;
  // The caller that waited for this join's answer disconnected: the member is suspect, unless it has retried. Nothing
  // if it is answered.
  void OnJoinGone(uint64_t call, TimePoint now);
  absl::StatusOr<v1::HeartbeatReply> Heartbeat(const v1::HeartbeatRequest& request, TimePoint now);
  // A member opened its stream, on which it is sent its state at once and at each change. It replaces an earlier stream
  // of the member.
  absl::Status Watch(uint64_t watch, const v1::WatchRequest& request, TimePoint now);
  // The stream broke: its member is suspect. Nothing for 0.
  void OnWatchGone(uint64_t watch, TimePoint now);
  // Answered when all workers are done and this one is the lead (the lowest rank), or the lead has left; or at the
  // deadline with who is waited for. ABORTED if the job fails. A member has one such call; a new one ends the old.
  void Done(uint64_t call, const v1::DoneRequest& request, TimePoint now, TimePoint deadline);
  // Answered with the member's next run of samples, or that all are used; or, at the deadline or if runs of its own are
  // not finished, that it has to ask again. A member has one such call; a new one ends the old. Errors are of
  // JobState::OnTakeRun and TakeRun.
  void TakeRun(uint64_t call, const v1::TakeRunRequest& request, TimePoint now, TimePoint deadline);
  // Answered with what all have brought, or at the deadline with who is missing (waiting_for). A member has one such
  // call; a new one ends the old. Errors are of JobState::OnReduce.
  void Reduce(uint64_t call, const v1::ReduceRequest& request, TimePoint now, TimePoint deadline);
  // The member with the id leaves; or the one with the join_request_id, where the worker never got to know its id: then
  // OK also where nobody has it.
  absl::Status Leave(const v1::LeaveRequest& request, TimePoint now);

  // ---- Operators

  // Changes hyperparameters on all shards, at one version (Cut, in ps.proto). Answered with it once every shard has
  // taken the change over, or at the deadline: DEADLINE_EXCEEDED, with the shard, and the rank and step that are waited
  // for. INVALID_ARGUMENT, with all that is wrong, FAILED_PRECONDITION or ABORTED if the job does not run,
  // RESOURCE_EXHAUSTED, naming it, while another change is under way; with these nothing is changed.
  void SetHyperparameters(uint64_t call, const v1::SetHyperparametersRequest& request, TimePoint now,
                          TimePoint deadline);
  // Takes a checkpoint that begins from now on. Answered when it is complete; or at the deadline with what is waited
  // for. FAILED_PRECONDITION if none are taken, or the job does not run; RESOURCE_EXHAUSTED if too many ask.
  void Checkpoint(uint64_t call, TimePoint now, TimePoint deadline);
  // Asks a worker to leave, by name or rank. Errors are of JobState::Drain.
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainRequest& request, TimePoint now);
  // Ends the job, also one that has ended and is served on (--keep_running). Errors are of JobState::ShutDown.
  absl::StatusOr<v1::ShutdownReply> ShutDown(TimePoint now);
  v1::StatusReply Status(TimePoint now, bool with_layout) const;
  JobCounts counts() const { return job_.progress().counts(); }

  // ---- The server

  // The job failed since gradients, weights or state were not finite.
  bool not_finite() const { return job_.not_finite(); }
  bool all_shards_know() const { return job_.all_shards_know(); }
  // Whom the job waits for: before it runs always, afterwards only if no step was made for `longer`. Empty: for nobody.
  std::string LongWait(TimePoint now, std::chrono::nanoseconds longer) const;
  // Ends leases and waits whose time is over.
  void Tick(TimePoint now);
  // This server itself was suspended for this long (its process or its machine): leases are extended by as much, and
  // for the length of a lease no member is lost because its connection broke.
  void OnGap(std::chrono::nanoseconds gap, TimePoint now) { job_.OnGap(gap, now); }
  // Makes the job fail for this reason (for example a shutdown). Does nothing if the job has ended.
  void Fail(const std::string& reason, TimePoint now);
  // This server leaves a job that takes checkpoints: the others wait for it to come back. Does nothing if the job, or
  // this generation of it, has ended.
  void Supersede(const std::string& reason, TimePoint now);
  // What became of CommitCheckpoint.
  void OnCommitted(uint64_t number, const absl::Status& committed, TimePoint now);

 private:
  void Add(ChiefAction action) { actions_.push_back(std::move(action)); }
  template <typename Action>
  void Add(std::vector<Action> actions) {
    for (Action& action : actions) actions_.emplace_back(std::move(action));
  }

  // Whether the job has what the shard needs and knows: FAILED_PRECONDITION, naming --checkpoint_dir, if not.
  absl::Status CheckCheckpoints(const v1::Registration& registration) const;
  // Whether there is a stream that this registration resumes.
  absl::Status CheckResumes(const v1::Registration& registration) const;
  // By what a shard that registers anew says, the present generation may be over.
  void EndIfLost(const v1::Registration& registration, TimePoint now);
  // Tells all shards the sets that were named.
  void TellDecisions(const std::vector<StepSet>& decided);
  // After an event that calls for a new view: tells the shards, and answers and tells whom it concerns.
  void ChangeView(TimePoint now);
  void AnswerJoins(TimePoint now);
  // The answer to a join that is refused; it is logged.
  void RefuseJoin(uint64_t call, const v1::JoinRequest& request, const absl::Status& why, TimePoint now);
  // The job takes it: it is answered later.
  void Admit(uint64_t call, const JobState::Joined& joined, TimePoint deadline);
  // Another call of this worker, or its answer to a rank, is there: it stands by no longer.
  void EndStandby(uint64_t join_request_id, const absl::Status& why);
  // Those who wait for a rank get one, if there is one, or hear that the job is over.
  void MoveStandbys(TimePoint now);
  // Ends a job that has had too few workers for too long, after a last checkpoint.
  void CheckTooFew(TimePoint now);
  void AnswerDones(TimePoint now);
  // Also records what was dealt and returned.
  void AnswerTakes(TimePoint now);
  // Also ends the open round of a reduction, if nobody is missing any more.
  void AnswerReduces(TimePoint now);
  // Tells each member its state if it changed; ends the streams that are no member's any more.
  void TellMembers(TimePoint now);
  // Carries out what a cut has come to.
  void MoveCut(const CutCoordinator::Outcome& outcome, TimePoint now);
  void TellCut(const v1::Cut& cut);
  // Begins the change that waits for a checkpoint's cut to end, or ends its wait.
  void MoveSet(TimePoint now);
  void AnswerSet(const absl::StatusOr<v1::SetHyperparametersReply>& reply);

  // ---- Checkpoints (chief_core_checkpoint.cc)

  bool takes_checkpoints() const { return job_.options().checkpoints.has_value(); }
  // Begins what is due.
  void MoveCheckpoint(TimePoint now);
  void BeginCheckpoint(bool at_once, TimePoint now);
  // The version that the one under way is to be of may never come: another one takes its place.
  void AbandonRound();
  void OnCheckpointWritten(uint32_t shard, const v1::CheckpointWritten& written, TimePoint now);
  // The checkpoint that is under way has come to this.
  void EndCheckpoint(const absl::Status& status, TimePoint now);
  void AnswerAsked(uint64_t checkpoint, const absl::StatusOr<v1::CheckpointReply>& reply);
  v1::CheckpointStatus CheckpointsStatus(TimePoint now) const;
  void GoBack(RollBack back, TimePoint now);
  void EndGeneration(const std::string& reason, TimePoint now);
  // The job, or this generation of it, is over: so is what it was about to do.
  void AbandonCuts();

  // What is worth a message of its own to a member.
  struct News {
    v1::Phase phase = v1::PHASE_UNSPECIFIED;
    bool initialise = false;
    bool lead = false;
    bool leave = false;
    uint64_t checkpoint_version = 0;
    bool operator==(const News&) const = default;
  };
  struct Change {
    uint64_t call = 0;
    JobState::Setting setting;
    TimePoint deadline;
    bool begun = false;
  };

  std::vector<ChiefAction> actions_;
  JobState job_;
  ShardStreams shard_streams_;
  std::map<uint64_t, News> told_;  // What members were told, by the numbers of their streams.
  WaitingCalls<v1::JoinReply> joins_;
  Standbys standbys_;
  WaitingCalls<v1::DoneReply> dones_;
  WaitingCalls<v1::TakeRunReply> takes_;
  WaitingCalls<v1::ReduceReply> reduces_;
  SparingLines refused_joins_;
  bool was_paused_ = false;            // When requests for runs were last answered.
  std::optional<uint64_t> giving_up_;  // The checkpoint after which a job with too few workers ends.
  v1::Phase told_end_ = v1::PHASE_UNSPECIFIED;
  CutCoordinator cut_;
  uint64_t changed_from_ = 0;     // The version from which the last change holds, where the chief says it.
  std::optional<Change> change_;  // The change of hyperparameters that is under way; nothing: none is.

  // The checkpoint that is under way, and who waits for it or, with 0, for the next.
  CheckpointRounds rounds_;
  Manifest manifest_;
  v1::SavedJob saved_job_;  // The job as it was at the cut.
  TimePoint checkpoint_began_;
  bool checkpoint_at_once_ = false;             // It is of what was decided when it began.
  std::optional<uint64_t> checkpoint_version_;  // It is to be of this, if that was named.
  WaitingCalls<v1::CheckpointReply> asked_;
  std::deque<uint64_t> kept_;       // Numbers of those that are complete.
  std::string checkpoint_path_;     // The last one that is complete has it.
  std::string checkpoint_failure_;  // Why the last one failed, if it did.
  // The last checkpoint is complete, or was tried for as long as --server_timeout; when its first attempt began; and
  // whether that has failed.
  bool saved_the_end_ = false;
  std::string end_not_saved_;  // Why the job has ended without.
  std::optional<TimePoint> finishing_since_;
  bool tried_the_end_ = false;
};

}  // namespace ps
