// The state of a job as its chief keeps it: members, shards, phase, who initialises and who leads. A deterministic
// core: no locks, no I/O, no clock, no callbacks. Its owner feeds it events in their order, with the time, and acts on
// what they return.
//
// Events that change what shards and members should know ask their owner for a new view (NextView).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clipping.h"
#include "common/clock.h"
#include "common/schedule.h"
#include "ps/v1/ps.pb.h"
#include "server/base/job_counts.h"
#include "server/base/rank_wait.h"
#include "server/checkpoint/restored_job.h"
#include "server/chief/job_progress.h"
#include "server/chief/job_terms.h"
#include "server/chief/membership.h"
#include "server/chief/norm_totals.h"
#include "server/chief/reductions.h"
#include "server/chief/run_dealer.h"
#include "server/chief/shard_table.h"
#include "server/chief/short_lives.h"
#include "server/chief/step_coordinator.h"
#include "server/config/optimizer_setup.h"
#include "server/config/options.h"

namespace ps {

struct ChiefOptions {
  std::string job = "default";
  uint64_t generation = 1;  // Larger than any earlier start's of this job.
  // These are ServerOptions's.
  uint32_t num_workers = 1;
  std::optional<uint32_t> min_workers;
  std::optional<uint32_t> max_workers;
  uint32_t max_standbys = 8;
  uint32_t num_shards = 1;
  ModeOptions mode;
  std::string optimizer = "sgd";    // kFromWorker: this, hyperparameters and clip come with the first join.
  Hyperparameters hyperparameters;  // The job begins with these,
  ScheduleOptions schedule;         // and with this.
  ClipOptions clip;
  std::chrono::nanoseconds lease = std::chrono::seconds(10);
  // How long a member whose connection broke has to reconnect.
  std::chrono::nanoseconds reconnect_grace = std::chrono::seconds(1);
  // How long a lost worker's rank is kept for another one, where the mode waits for it.
  std::chrono::nanoseconds replacement_timeout = std::chrono::seconds(60);
  // A running job that makes no step for this long fails.
  std::chrono::nanoseconds progress_timeout = std::chrono::minutes(10);
  // How long pushes are held back at most to bring all shards to one point.
  std::chrono::nanoseconds cut_timeout = std::chrono::seconds(1);
  int64_t max_shard_elements = INT64_MAX;       // A server's memory holds a model of so many.
  std::map<std::string, std::string> settings;  // Flags that all servers must share.
  WireFormat wire;
  bool hands_out_runs = false;      // --budget=job.
  bool returns_stale_runs = false;  // --stale_runs=return.
  JobCounts counts = {};            // Of this process, in earlier generations.
  // Unset: no checkpoints are taken.
  struct Checkpoints {
    CheckpointEvery every;
    size_t keep = 3;
    uint64_t next_number = 1;
    std::vector<uint64_t> complete;  // Numbers of those that there are, in their order.
    std::chrono::nanoseconds server_timeout = std::chrono::seconds(60);
    std::string path;          // The folder as this server names it; their own paths begin with it.
    std::string dir;           // The same as it is told to others; empty: nobody is told.
    bool any_descent = false;  // It was told not to go on from what was there (--restore=none, or a path).
    bool again = false;        // This process has served an earlier generation of the job.
    std::shared_ptr<const RestoredJob> restored;  // This generation begins with it; null: it begins anew.

    // Whether checkpoints are removed that this generation does not descend from. It is so until the job goes on from a
    // checkpoint of its own: then they are gone.
    bool removes_others() const { return any_descent && (restored == nullptr || !restored->is_own); }
  };
  std::optional<Checkpoints> checkpoints = {};

  uint32_t least_workers() const { return min_workers.value_or(num_workers); }
  uint32_t most_workers() const { return max_workers.value_or(num_workers); }
  bool elastic() const { return least_workers() < most_workers(); }
};

class JobState {
 public:
  // What is restored must be good (CheckRestored).
  JobState(const ChiefOptions& options, std::unique_ptr<Mode> mode);
  // OK, or why the job cannot begin with its checkpoint: FAILED_PRECONDITION or INVALID_ARGUMENT, naming the
  // checkpoint.
  static absl::Status CheckRestored(const ChiefOptions& options);
  // FAILED_PRECONDITION, naming both folders, if `who` knows of checkpoints that this generation does not descend from.
  absl::Status CheckDescent(const v1::KnownCheckpoints& known, const std::string& who) const;

  // ---- What is

  const ChiefOptions& options() const { return options_; }
  const Mode& mode() const { return steps_.mode(); }
  bool names_sets() const { return steps_.leads(); }
  // The first version that no shard can have begun. Where they may build one speculatively, that is not the next.
  uint64_t first_not_begun() const { return mode().step() + (mode().synchronous() ? 2 : 1); }
  // The optimizer that the job began with, and whether workers brought it.
  const OptimizerTerms& optimizer() const { return terms_.optimizer(); }
  ToldLayouts& told_layouts() { return terms_.told_layouts(); }
  // The hyperparameters as they were last set, or, for the learning rate, told by a push, as shard 0 knows it; none as
  // long as there is no optimizer.
  HyperparameterValues hyperparameters() const;
  // The same for the schedule; nothing as long as it is not known how long an epoch is.
  std::optional<Schedule> schedule() const;
  // 0: no worker has told it.
  uint64_t samples_per_epoch() const { return terms_.samples_per_epoch(); }
  // The mode has refused pushes of so many samples, as shard 0 counts them.
  uint64_t dropped_samples() const { return dropped_samples_; }
  v1::Phase phase() const { return phase_; }
  const std::string& failure() const { return failure_; }  // PHASE_FAILED has one.
  bool ended() const {
    return phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED || phase_ == v1::PHASE_SHUT_DOWN;
  }
  bool superseded() const { return !superseded_.empty(); }  // The job goes on as another generation.
  bool over() const { return ended() || superseded(); }
  // All are done: the lead evaluates and saves, then all leave.
  bool finishing() const { return finishing_; }
  bool lead_left() const { return lead_left_; }  // It left in order, in that time.
  uint64_t view() const { return view_; }
  const Membership& members() const { return members_; }
  const ShardTable& shards() const { return shards_; }
  const std::optional<SlicePlan>& plan() const { return terms_.plan(); }
  const RunDealer& runs() const { return runs_; }
  RunDealer& runs() { return runs_; }
  const OwnData& own_data() const { return own_data_; }
  // Shards are told the model once it is known how many samples an epoch has.
  bool tells_layout() const { return plan().has_value() && (!terms_.own_data() || own_data_.of_all().has_value()); }
  // Whether a member that came with this view may be answered.
  bool MayAnswerJoin(uint64_t view) const;
  std::optional<uint32_t> initialiser() const { return initialiser_; }
  // Whether this rank is the one to send initial values, and every shard knows that it is.
  bool MayInitialise(uint32_t rank) const;
  // While workers are still joining, the lead is rank 0.
  bool IsLead(const Member& member) const;
  TimePoint last_progress() const { return last_progress_; }  // It is known while the job runs.

  // An error if the job has ended: ABORTED with its failure, FAILED_PRECONDITION if it is finished; UNAVAILABLE if this
  // generation of it is over.
  absl::Status Serving() const;
  // When the job was last restored with another number of workers; zeros: never.
  struct Resized {
    uint64_t step = 0;
    uint64_t samples = 0;  // So many had passed.
  };
  // It failed since gradients, weights or state were not finite.
  bool not_finite() const { return not_finite_; }
  // Every shard has heard of the newest view.
  bool all_shards_know() const { return shards_.AllHaveHeard(view_); }
  const Resized& resized() const { return resized_; }
  // The checkpoint that this generation begins with; null: none.
  const RestoredJob* restored() const;
  // Whom or what the job waits for, in words; empty: for nobody.
  std::string WaitingFor(TimePoint now) const;
  // How it gets on, for who watches it.
  const JobProgress& progress() const { return progress_; }
  JobProgress& progress() { return progress_; }
  // Whom the step in the making waits for now.
  RankWait Waits(TimePoint now) const;
  // "no version for 12 s; waiting for rank 3 (w3 on host-b, last heard from 0.4 s ago)"; empty: the job is not stuck.
  std::string Stuck(TimePoint now) const;
  // The job would run, but for the checkpoint that it is to have first.
  bool AwaitsFirstCheckpoint(TimePoint now) const;

  // ---- Shards

  // Errors are those of ShardTable::Register. With OK, a new view is due.
  absl::Status RegisterShard(const v1::Registration& registration, TimePoint now);
  // The same process opened its stream again. A new view is due.
  void ResumeShard(uint32_t shard, TimePoint now);
  void OnShardGone(uint32_t shard, TimePoint now);
  struct ReportOutcome {
    bool view_is_due = false;
    bool view_in_force = false;    // One has come into force.
    std::vector<StepSet> decided;  // To be told to every shard, as is the next.
    std::vector<v1::NormTotals> norms;
  };
  ReportOutcome OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now);
  // These ranks' workers wait for runs, and have none. Returns the sets that are named by it, to be told to every
  // shard.
  std::vector<StepSet> SetIdle(const std::set<uint32_t>& ranks, TimePoint now) {
    return phase_ == v1::PHASE_RUNNING ? steps_.SetIdle(ranks, now) : std::vector<StepSet>();
  }
  // The sets that have waited for long enough for more pushes; to be told, too.
  std::vector<StepSet> Tick(TimePoint now) {
    return phase_ == v1::PHASE_RUNNING ? steps_.Tick(now) : std::vector<StepSet>();
  }

  // ---- Members

  struct Joined {
    Member member;
    uint64_t view = 0;  // It must be in force before the join is answered.
  };
  // The errors of Join but for those of ranks.
  absl::Status CheckJoin(const v1::JoinRequest& request, bool room) const;
  // RESOURCE_EXHAUSTED if there is no `room` for one more join that waits, unless the join could not succeed anyhow.
  absl::StatusOr<Joined> Join(const v1::JoinRequest& request, bool room, TimePoint now);
  // Workers come and go, and this one has to wait: until a rank is free, or until its host's time has come.
  bool HasToWait(const v1::JoinRequest& request, TimePoint now) const;
  // Why such a one waits; empty: it may join now, or the job is over.
  std::string WhyItWaits(const v1::JoinRequest& request, TimePoint now) const;
  bool HasFreeRank() const { return !members_.FreeRanks().empty(); }
  // Training stands still, since there are fewer workers than it needs: no run is dealt, and none is open.
  bool paused() const { return HasTooFew() && runs_.RanksWithOpen().empty(); }
  // Why the job, which has had fewer than its least number of workers for as long as others had to come, is to end;
  // nothing: it need not.
  std::optional<std::string> TooFewForTooLong(TimePoint now) const;
  // Whether members have joined whom the next view is to have, and it is time for that view. While shards have not
  // acknowledged the last one, those who join are gathered for one view, at most until CheckTimes.
  bool NewcomersAreDue() const {
    return has_newcomers_ && (shards_.AllAcknowledge(view_) || !shards_.Missing().empty());
  }
  // The flags for a worker that will claim this rank, or else get the one of RankForNewcomer: those that the rank's
  // last owner was started with, or, if nobody has had the rank, those of the first worker. None before the job runs:
  // its first workers know theirs.
  const WorkerFlags& FlagsFor(std::optional<uint32_t> rank) const;
  // The view with this member is in force: the member's steps and its lease begin.
  void Begin(Member* member, TimePoint now);
  // Its join could not be answered yet; it asks again.
  void OnJoinLate(Member* member, TimePoint now) { member->last_heard = now; }
  // The caller of this member's join is gone, and no other call waits for the join's answer.
  void OnJoinGone(Member* member, TimePoint now) { member->suspect_since = now; }
  // The member of this identity, which counts as heard from now; if there is none, FencedError. The pointer lasts until
  // the next event.
  absl::StatusOr<Member*> Hear(const v1::Identity& id, TimePoint now);
  // FAILED_PRECONDITION (fenced), naming the rank's new owner, for who is a member no more.
  absl::Status FencedError(uint32_t rank, uint64_t incarnation) const;
  Member* Find(uint32_t rank, uint64_t incarnation) { return members_.Find(rank, incarnation); }
  // Returns whether what the member is busy with has changed, so that a view is due.
  bool OnHeartbeat(Member* member, const v1::HeartbeatRequest& heartbeat, TimePoint now);
  // Asks the member of this name, or else of this rank, to leave. NOT_FOUND, naming the members that there are, if it
  // is not among them; else the errors of Serving.
  absl::StatusOr<Member*> Drain(const std::string& worker);
  void OnWatchOpened(Member* member, uint64_t watch);
  void OnWatchGone(uint64_t watch, TimePoint now);
  // Returns whether that is new; then a view is due.
  bool OnDone(Member* member, bool counts_as_empty, TimePoint now);
  // The member asks for a run: notes what the request says. UNAVAILABLE if the job does not run yet; else the errors of
  // RunDealer::OnRequest.
  absl::Status OnTakeRun(const Member& member, const v1::TakeRunRequest& request);
  // What it gets, if it need not wait. Errors are of RunDealer::Take.
  absl::StatusOr<v1::TakeRunReply> TakeRun(const Member& member, uint64_t number, TimePoint now);
  // The member brings numbers for a reduction, or asks for its answer again. UNAVAILABLE if the job does not run yet,
  // FAILED_PRECONDITION if the member is done; else the errors of Reductions::Check and Bring.
  absl::Status OnReduce(const Member& member, const v1::ReduceRequest& request, TimePoint now);
  // The member's answer, if it need not wait.
  std::shared_ptr<const v1::ReduceReply> Reduced(const Member& member, uint64_t number) const {
    return reductions_.Find(member.rank, member.incarnation, number);
  }
  // Members have come or gone, or are done: ends the open round of a reduction if nobody is missing any more.
  void MoveReductions() {
    if (!reductions_.empty()) reductions_.Move(Participants());
  }
  // "all_mean accuracy: waiting for rank 1 (worker-1 on host-b, last heard from 2 s ago)"; empty: no round is open.
  std::string WaitingForReduction(TimePoint now) const;
  // Returns whether a view is due. The error is that of Hear.
  absl::StatusOr<bool> Leave(const v1::LeaveRequest& request, TimePoint now);
  // The member of this rank knows how the job ended.
  void Dismiss(uint32_t rank) { members_.Remove(rank); }

  // ---- Time, and the end

  // Ends leases and other times. Returns whether a view is due. A member whose join is not answered yet (`is_joining`)
  // is not lost: it sends no heartbeats, and its wait has a deadline of its own.
  bool CheckTimes(TimePoint now, const std::function<bool(const Member&)>& is_joining);
  // This server was suspended for this long: its times end later by as much, and for the length of a lease no member is
  // lost because its connection broke.
  void OnGap(std::chrono::nanoseconds gap, TimePoint now);
  // What a request to set hyperparameters asks for. INVALID_ARGUMENT names all that is wrong with it; an error also if
  // the job does not run, or nobody has told it how long the epochs of the schedule are.
  struct Setting {
    HyperparameterValues values;
    std::optional<Schedule> schedule;  // Unset: it stays as it is.
  };
  absl::StatusOr<Setting> CheckSet(const v1::SetHyperparametersRequest& request) const;
  void OnSet(const Setting& setting);
  // Returns whether a view is due: not if the job has ended.
  bool Fail(const std::string& reason);
  // An operator ends the job; it may have ended by itself. UNAVAILABLE if this generation is over.
  absl::Status ShutDown();
  void Supersede(const std::string& reason) { superseded_ = reason; }
  // The first checkpoint is taken, or cannot be. A view is due.
  void HasFirstCheckpoint() { awaits_first_checkpoint_ = false; }
  void HasCheckpoint(uint64_t version) { checkpoint_version_ = version; }
  // The version of the newest complete checkpoint, which may be the restored one; 0: there is none, or it is the first.
  uint64_t checkpoint_version() const { return checkpoint_version_; }
  // What a checkpoint holds of the job, but for the steps, which the shards know.
  v1::SavedJob Save() const;

  // Starts the job or its end if it is time, chooses who initialises, and numbers a new view.
  // Returns the sets of pushes that are named because of it, in order.
  std::vector<StepSet> NextView(TimePoint now);

 private:
  static JobTerms MakeTerms(const ChiefOptions& options);
  // The rank that a worker of this name gets by claiming this one; nothing: any. Where workers come and go, a rank is
  // no more than a name: a claim of one that is not free counts as none.
  std::optional<uint32_t> Grant(std::optional<uint32_t> claim, const std::string& name) const;
  // A rank's step says nothing of its place in the data, and nobody waits for a lost rank: so a rank may begin
  // anywhere.
  bool StepsAreFree() const { return runs_.hands_out() && mode().OnLoss() != LossAction::kWait; }
  // Checks a join, as this rank, of a worker whose samples are its own. Errors are those of OwnData::Check and
  // JobTerms::CheckSchedule; FAILED_PRECONDITION if the job hands out runs.
  absl::Status CheckOwnData(uint32_t rank, const v1::DataSummary& data) const;
  void AddOwnData(uint32_t rank, const v1::DataSummary& data);
  // One that no member has.
  std::string ChooseName();
  // FAILED_PRECONDITION, with the flag, if the worker lacks what the job needs (JoinRequest.features).
  absl::Status CheckFeatures(const v1::JoinRequest& request) const;
  // If the last member leaves before the job runs, model and experiment are reset.
  void RemoveMember(const Member& member);
  void LoseMember(const Member& member, const std::string& why, TimePoint now);
  // The step that this rank itself has come to, where ranks go on by themselves; nothing: it begins where others are.
  std::optional<uint64_t> OwnStep(const Member& member) const;
  // The step at which a member begins that has none of its own.
  uint64_t StartStep() const;
  void Restore(const RestoredJob& restored);
  // Whether the job is to end: all workers are done, and no other has to come.
  bool NothingIsLeft() const;
  // A server that died, or whose connection broke, has to come back in its time, and a lost worker to be replaced.
  void CheckAbsent(TimePoint now);
  void CheckRestoring(TimePoint now);
  // After a rollback the workers come back. Fails the job if a rank that it waits for is still free when the first
  // worker has been back for as long as the others have time.
  void CheckRejoining(TimePoint now);
  // As many as the job needs: when all runs are used, one, who evaluates.
  size_t needed_workers() const { return runs_.AllUsed() ? 1 : options_.least_workers(); }
  // Workers come and go, and there are fewer than that.
  bool HasTooFew() const {
    return options_.elastic() && phase_ == v1::PHASE_RUNNING && !finishing_ &&
           members_.members().size() < needed_workers();
  }
  void CountWorkers(TimePoint now);
  // Who takes part in reductions.
  std::vector<Reductions::Participant> Participants() const;
  Reductions::Participant ParticipantOf(const Member& member) const;
  // What WaitingFor says, but for reductions.
  std::string WaitingForSteps(TimePoint now) const;
  // "rank 1 (worker-1 on host-b, evaluating, last heard from 2 s ago)", of the first few of them.
  std::string DescribeMembers(const std::vector<uint32_t>& ranks, TimePoint now) const;
  std::optional<std::chrono::nanoseconds> StuckFor(TimePoint now) const;
  // Says once that the job is stuck, and once that it goes on.
  void SayStuck(TimePoint now);
  // "2 more workers (1 of at least 3 are there)", while there are too few of them.
  std::string MissingWorkers() const;
  void SayTooFew(TimePoint now);
  // Whether everybody is here whom the job needs to run.
  bool Complete(TimePoint now) const;
  // Whether all who took part in the restored job are here, or have had their time.
  bool HasRestoredMembers(TimePoint now) const;
  void SetPhase(v1::Phase phase, const std::string& failure);

  const ChiefOptions options_;
  Membership members_;
  Replacements replacements_;
  ShardTable shards_;
  JobTerms terms_;
  StepCoordinator steps_;
  NormTotals norms_;
  JobProgress progress_;
  HyperparameterValues set_values_;
  std::optional<float> told_learning_rate_;
  std::optional<Schedule> set_schedule_;
  uint64_t dropped_samples_ = 0;
  uint64_t checkpoint_version_ = 0;
  bool not_finite_ = false;
  Resized resized_;
  RunDealer runs_;
  Reductions reductions_;
  OwnData own_data_;
  v1::Phase phase_ = v1::PHASE_GATHERING;
  std::string failure_;
  uint64_t view_ = 0;
  uint64_t chosen_names_ = 0;
  bool has_newcomers_ = false;  // Members have joined who are in no view yet.
  // The first view with the present layout; what shards say of initial values before they have that view is about an
  // earlier layout.
  uint64_t layout_view_ = 0;
  std::optional<uint32_t> initialiser_;
  uint64_t initialiser_view_ = 0;  // The first view that names it.
  bool finishing_ = false;
  bool lead_left_ = false;
  std::map<uint32_t, WorkerFlags> own_flags_;  // By rank, of workers that were started with others than the first.
  ShortLives short_lives_;                     // Where workers come and go.
  std::deque<uint64_t> cancelled_joins_;       // join_request_ids; such a join may arrive late.
  TimePoint keep_suspects_until_;
  TimePoint last_progress_;
  TimePoint last_push_;                     // Some shard has told of a complete push, where the chief names the sets.
  std::optional<TimePoint> stuck_since_;    // It was said that the job is stuck, and there was no version since then.
  std::optional<TimePoint> too_few_since_;  // Since when the running job has had fewer workers than it needs.
  TimePoint too_few_said_;
  std::string superseded_;  // Why, if it is.
  bool awaits_first_checkpoint_ = false;
  // These two are the restored job's: the step at which each rank goes on, as long as its first owner is there; and who
  // took part.
  std::map<uint32_t, uint64_t> restored_steps_;
  std::set<uint32_t> restored_members_;
  // The highest of the restored steps, where any rank may begin there: shards may not have read the checkpoint yet.
  uint64_t restored_highest_ = 0;
  std::optional<TimePoint> began_;            // The first time that times were looked at.
  std::optional<TimePoint> rejoining_since_;  // When the first worker came back to the restored job.
};

}  // namespace ps
