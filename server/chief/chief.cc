#include "server/chief/chief.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "common/text.h"
#include "server/chief/job_messages.h"

namespace ps {
namespace {

constexpr size_t kMaxHostBytes = 256;     // In the log.
constexpr size_t kMaxJoinsPerWorker = 4;  // That wait for their answer.
constexpr size_t kMaxBusyBytes = 256;
constexpr std::chrono::seconds kSayRefusedEvery(1);  // Whoever asks is told each time.

void AddDecisions(const std::vector<StepSet>& sets, uint64_t dropped_samples, v1::ChiefUpdate& update) {
  for (const StepSet& set : sets) {
    v1::StepDecision* decision = update.add_decisions();
    decision->set_step(set.step);
    decision->set_dropped_samples(dropped_samples);
    for (const uint32_t rank : set.ranks) decision->add_ranks(rank);
  }
}

absl::Status FencedError(uint32_t rank) {
  return absl::FailedPreconditionError(absl::StrCat("fenced: rank ", rank, " belongs to another worker, or was lost"));
}

}  // namespace

Chief::Chief(const ChiefOptions& options, std::function<void(v1::Phase, const std::string&)> on_end,
             MetricsWriter* metrics, CheckpointCalls checkpoint_calls)
    : on_end_(std::move(on_end)),
      metrics_(metrics),
      job_(options, MakeMode(options.mode, options.num_workers)),
      shards_(options.num_shards, outbox_),
      cut_(options.num_shards, options.cut_timeout),
      refused_joins_(kSayRefusedEvery),
      checkpoint_calls_(std::move(checkpoint_calls)),
      rounds_(options.checkpoints.value_or(ChiefOptions::Checkpoints()).every, options.num_shards,
              options.checkpoints.value_or(ChiefOptions::Checkpoints()).next_number) {
  if (options.checkpoints.has_value()) {
    kept_.assign(options.checkpoints->complete.begin(), options.checkpoints->complete.end());
  }
  const RestoredJob* const restored = job_.restored();
  if (restored == nullptr || !restored->is_own) return;
  rounds_.Restored(restored->manifest.version(), Now());
  checkpoint_path_ = restored->path;
  saved_the_end_ = restored->manifest.finished;
}

// ---- Shards

absl::StatusOr<uint64_t> Chief::RegisterShard(const v1::Registration& registration, SendFunction send, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  PS_RETURN_IF_ERROR(job_.shards().Check(registration));
  const uint32_t shard = registration.shard();
  if (registration.resumes() > 0) {
    PS_RETURN_IF_ERROR(CheckResumes(registration));
    if (!job_.ended()) job_.ResumeShard(shard, now);
  } else {
    if (const absl::Status same = CheckCheckpoints(registration); !same.ok()) {
      spdlog::warn("a server was refused: {}", Message(same));
      return same;
    }
    EndIfLost(registration, now);
    PS_RETURN_IF_ERROR(job_.RegisterShard(registration, now));
  }
  const uint64_t connection = shards_.Open(registration, std::move(send));
  if (!job_.ended()) ChangeView(now);
  return connection;
}

absl::Status Chief::CheckCheckpoints(const v1::Registration& registration) const {
  const std::string who = absl::StrCat("shard ", registration.shard());
  if (takes_checkpoints() && registration.takes_no_checkpoints()) {
    return absl::FailedPreconditionError(absl::StrCat(
        who, " was started without --checkpoint_dir, and the chief with --checkpoint_dir=",
        job_.options().checkpoints->dir, ": no checkpoint would be complete; start it with this folder, or its own"));
  }
  return job_.CheckDescent(registration.known_checkpoints(), who);
}

absl::Status Chief::CheckResumes(const v1::Registration& registration) const {
  if (superseded_) return job_.Serving();
  const uint64_t generation = job_.options().generation;
  if (registration.resumes() == generation && shards_.CanResume(registration)) return absl::OkStatus();
  return absl::NotFoundError(
      registration.resumes() == generation
          ? "the chief cannot resume this shard's stream"
          : absl::StrCat("the chief was started again, or went back to a checkpoint: generation ",
                         registration.resumes(), " is over"));
}

void Chief::EndIfLost(const v1::Registration& registration, TimePoint now) {
  if (!takes_checkpoints()) return;
  const uint32_t shard = registration.shard();
  if (registration.generation() > job_.options().generation) {
    return RollBack(absl::StrCat("shard ", shard, " has heard of a later generation"), now, "",
                    registration.generation());
  }
  const std::vector<uint32_t> missing = job_.shards().Missing();
  const bool lost = job_.shards().ever_registered(shard) && std::count(missing.begin(), missing.end(), shard) > 0;
  if (!lost || (job_.phase() != v1::PHASE_RUNNING && rounds_.idle())) return;
  RollBack(absl::StrCat("server ", shard, " at ", registration.address(), " was started again"), now);
}

void Chief::OnShardGone(uint32_t shard, uint64_t connection, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (shards_.Close(shard, connection)) job_.OnShardGone(shard, now);
}

void Chief::OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (!shards_.Receive(shard, report)) return;
  const JobState::ReportOutcome outcome = job_.OnReport(shard, report, now);
  if (!outcome.decided.empty()) {
    v1::ChiefUpdate update;
    AddDecisions(outcome.decided, job_.dropped_samples(), update);
    Broadcast(update);
  }
  for (const v1::NormTotals& totals : outcome.norms) {
    v1::ChiefUpdate update;
    *update.add_norms() = totals;
    Broadcast(update);
  }
  if (report.has_cut()) MoveCut(cut_.OnReport(shard, report.cut(), now));
  if (report.has_checkpoint()) OnCheckpointWritten(shard, report.checkpoint(), now);
  if (!report.restore_failure().empty() && job_.restored() != nullptr) {
    RollBack(report.restore_failure(), now, job_.restored()->path);
  }
  MoveCheckpoint(now);
  if (outcome.view_is_due) return ChangeView(now);
  AnswerTakes(now);  // Runs may have come back.
  if (!outcome.view_in_force) return;
  AnswerJoins(now);
  if (job_.phase() == v1::PHASE_GATHERING) streams_.Tell(job_, now, outbox_);  // The initialiser, once all know it.
}

void Chief::ChangeView(TimePoint now) {
  const std::vector<StepSet> decided = job_.NextView(now);
  v1::ChiefUpdate update;
  *update.mutable_view() = MakeView(job_, now);
  AddDecisions(decided, job_.dropped_samples(), update);
  Broadcast(update);
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
  streams_.Tell(job_, now, outbox_);
  if (job_.ended()) {
    cut_.Abandon();
    if (set_callback_) AnswerSet(job_.Serving());
    AbandonCheckpoint();
  }
  MoveCheckpoint(now);
  if (!job_.ended() || std::exchange(told_end_, job_.phase()) == job_.phase()) return;
  outbox_.Add([this, phase = job_.phase(), failure = job_.failure()] { on_end_(phase, failure); });
}

// ---- Workers

uint64_t Chief::Join(const v1::JoinRequest& request, TimePoint now, TimePoint deadline, JoinCallback callback) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const bool room = joins_.size() < kMaxJoinsPerWorker * job_.options().num_workers;
  const absl::StatusOr<JobState::Joined> joined = job_.Join(request, room, now);
  if (!joined.ok()) {
    if (const std::optional<uint64_t> left_out = refused_joins_.Admit(now); left_out.has_value()) {
      const std::string others = *left_out == 0 ? "" : absl::StrCat(" (", *left_out, " other joins before it)");
      spdlog::warn("a worker on {} was refused: {}{}", Printable(request.host(), kMaxHostBytes),
                   Message(joined.status()), others);
    }
    outbox_.Add([callback, status = joined.status()] { callback(status); });
    return 0;
  }
  const uint64_t number = next_number_++;
  joins_.Add({.number = number,
              .rank = joined->member.rank,
              .incarnation = joined->member.incarnation,
              .view = joined->view,
              .deadline = deadline,
              .callback = std::move(callback)});
  if (job_.NewcomersAreDue()) {
    ChangeView(now);
  } else {
    AnswerJoins(now);
  }
  return number;
}

void Chief::OnJoinGone(uint64_t join, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const auto gone = joins_.Take(join);
  if (!gone.has_value()) return;
  outbox_.Add([callback = gone->callback] { callback(absl::CancelledError("the caller disconnected")); });
  if (joins_.Has(gone->rank, gone->incarnation)) return;
  // A caller whose time is up goes away as well, before the answer if this machine is busy. It asks again.
  Member* const member = job_.Find(gone->rank, gone->incarnation);
  if (gone->deadline <= now && member != nullptr) return job_.OnJoinLate(member, now);
  job_.OnJoinGone(gone->rank, gone->incarnation, now);
}

absl::StatusOr<v1::HeartbeatReply> Chief::Heartbeat(const v1::HeartbeatRequest& request, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (request.id().job() == job_.options().job && request.id().generation() != job_.options().generation) {
    v1::HeartbeatReply over;
    over.set_phase(job_.phase());
    over.set_failure(job_.failure());
    over.set_generation(job_.options().generation);
    return over;
  }
  if (job_.ended()) {
    v1::HeartbeatReply ended;
    ended.set_phase(job_.phase());
    ended.set_failure(job_.failure());
    return ended;
  }
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  if (!member.ok()) return member.status();
  PS_RETURN_IF_ERROR(
      CheckText(absl::StrCat("rank ", request.id().rank(), ": busy_with"), request.busy_with(), kMaxBusyBytes));
  if (job_.OnHeartbeat(*member, request.step(), request.busy_with(), now)) ChangeView(now);
  return MakeMemberState(job_, **member, now);
}

absl::StatusOr<uint64_t> Chief::Watch(const v1::WatchRequest& request, TimePoint now, WatchFunction send) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  if (!member.ok()) return member.status();
  const uint64_t number = next_number_++;
  job_.OnWatchOpened(*member, number);
  streams_.Add(number, request.id().rank(), std::move(send));
  streams_.Tell(job_, now, outbox_);
  return number;
}

void Chief::OnWatchGone(uint64_t watch, TimePoint now) {
  MutexLock lock(mutex_);
  streams_.Remove(watch);
  job_.OnWatchGone(watch, now);
}

void Chief::Done(const v1::DoneRequest& request, TimePoint now, TimePoint deadline, DoneCallback callback) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  if (!member.ok()) return outbox_.Add([callback, status = member.status()] { callback(status); });
  const uint32_t rank = (*member)->rank;
  const uint64_t incarnation = (*member)->incarnation;
  // It asks again: nobody listens to its earlier call any more.
  if (const auto earlier = dones_.Take(rank, incarnation); earlier.has_value()) {
    outbox_.Add([callback = earlier->callback] { callback(absl::CancelledError("the worker asked again")); });
  }
  dones_.Add({.number = next_number_++,
              .rank = rank,
              .incarnation = incarnation,
              .deadline = deadline,
              .callback = std::move(callback)});
  if (job_.OnDone(*member, request.counts_as_empty(), now)) return ChangeView(now);
  AnswerDones(now);
}

void Chief::TakeRun(const v1::TakeRunRequest& request, TimePoint now, TimePoint deadline, TakeRunCallback callback) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  const absl::Status taken = member.ok() ? job_.OnTakeRun(**member, request) : member.status();
  if (!taken.ok()) return outbox_.Add([callback, taken] { callback(taken); });
  const uint32_t rank = (*member)->rank;
  const uint64_t incarnation = (*member)->incarnation;
  // It asks again: nobody listens to its earlier call any more.
  if (const auto earlier = takes_.Take(rank, incarnation); earlier.has_value()) {
    outbox_.Add([callback = earlier->callback] { callback(absl::CancelledError("the worker asked again")); });
  }
  takes_.Add({.number = request.number(),
              .rank = rank,
              .incarnation = incarnation,
              .deadline = deadline,
              .callback = std::move(callback)});
  AnswerTakes(now);
}

absl::Status Chief::Leave(const v1::LeaveRequest& request, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<bool> view_is_due = job_.Leave(request, now);
  if (!view_is_due.ok()) return view_is_due.status();
  if (*view_is_due) {
    ChangeView(now);
  } else {
    streams_.Tell(job_, now, outbox_);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::WorkerFlagsReply> Chief::FlagsFor(const v1::WorkerFlagsRequest& request) {
  MutexLock lock(mutex_);
  PS_RETURN_IF_ERROR(job_.Serving());
  v1::WorkerFlagsReply reply;
  reply.set_job(job_.options().job);
  const WorkerFlags& flags = job_.FlagsFor(request.has_rank() ? std::optional<uint32_t>(request.rank()) : std::nullopt);
  reply.mutable_flags()->insert(flags.begin(), flags.end());
  return reply;
}

absl::StatusOr<v1::DrainReply> Chief::Drain(const v1::DrainRequest& request, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = job_.Drain(request.worker());
  if (!member.ok()) return member.status();
  streams_.Tell(job_, now, outbox_);
  v1::DrainReply reply;
  reply.set_rank((*member)->rank);
  reply.set_name((*member)->name);
  reply.set_host((*member)->host);
  return reply;
}

absl::StatusOr<v1::ShutdownReply> Chief::ShutDown(TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  PS_RETURN_IF_ERROR(job_.ShutDown());
  ChangeView(now);
  v1::ShutdownReply reply;
  reply.set_job(job_.options().job);
  return reply;
}

// ---- Time, and the end

void Chief::Tick(TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const auto is_joining = [&](const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return joins_.Has(member.rank, member.incarnation);
  };
  if (const uint64_t left_out = refused_joins_.TakeLeftOut(now); left_out > 0) {
    spdlog::warn("{} other joins were refused", left_out);
  }
  MoveCut(cut_.CheckTimes(now));
  MoveSet(now);
  MoveCheckpoint(now);
  if (job_.CheckTimes(now, is_joining)) return ChangeView(now);
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
}

void Chief::OnGap(std::chrono::nanoseconds gap, TimePoint now) {
  MutexLock lock(mutex_);
  job_.OnGap(gap, now);
}

void Chief::Fail(const std::string& reason, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (job_.Fail(reason)) ChangeView(now);
}

v1::StatusReply Chief::Status(TimePoint now, bool with_layout) {
  MutexLock lock(mutex_);
  v1::StatusReply status = MakeStatus(job_, now);
  if (with_layout && job_.plan().has_value()) *status.mutable_layout() = ToProto(job_.plan()->layout());
  if (takes_checkpoints()) *status.mutable_checkpoints() = CheckpointsStatus(now);
  return status;
}

std::string Chief::LongWait(TimePoint now, std::chrono::nanoseconds longer) {
  MutexLock lock(mutex_);
  const bool for_long = job_.phase() == v1::PHASE_RUNNING && now - job_.last_progress() > longer;
  return job_.phase() == v1::PHASE_GATHERING || for_long ? job_.WaitingFor(now) : "";
}

// ---- What the chief answers to calls that wait: joins, ends and requests for runs.

void Chief::AnswerJoins(TimePoint now) {
  joins_.AnswerWhere(
      [&](const auto& join) {
        mutex_.AssertHeld();
        return AnswerTo(join, now);
      },
      outbox_);
}

void Chief::AnswerDones(TimePoint now) {
  dones_.AnswerWhere(
      [&](const auto& done) {
        mutex_.AssertHeld();
        return AnswerTo(done, now);
      },
      outbox_);
}

void Chief::AnswerTakes(TimePoint now) {
  takes_.AnswerWhere(
      [&](const auto& take) {
        mutex_.AssertHeld();
        return AnswerTo(take, now);
      },
      outbox_);
  for (const JobRuns::Record& record : job_.TakeRunRecords()) {
    if (metrics_ != nullptr) metrics_->Write(record.event, record.fields);
  }
}

Chief::JoinAnswer Chief::AnswerTo(const WaitingCalls<v1::JoinReply>::Call& join, TimePoint now) {
  Member* const member = job_.Find(join.rank, join.incarnation);
  if (const absl::Status serving = job_.Serving(); !serving.ok()) {
    if (member != nullptr) job_.Dismiss(join.rank);  // This answer tells it.
    return serving;
  }
  if (member == nullptr) {
    return absl::FailedPreconditionError("the worker left, or another joined under its name");
  }
  if (job_.tells_layout() && job_.shards().AllAcknowledge(job_.AnswersJoinFrom(join.view))) {
    job_.Begin(member, now);
    return MakeJoinReply(job_, *member);
  }
  if (join.deadline > now) return std::nullopt;
  job_.OnJoinLate(member, now);
  return absl::DeadlineExceededError("joining: " + job_.WaitingFor(now));
}

Chief::DoneAnswer Chief::AnswerTo(const WaitingCalls<v1::DoneReply>::Call& done, TimePoint now) {
  if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
  const Member* const member = job_.Find(done.rank, done.incarnation);
  if (member == nullptr) return FencedError(done.rank);
  v1::DoneReply reply;
  const bool lead = job_.IsLead(*member);
  if (job_.finishing() && finished_saving() && (lead || job_.lead_left())) {
    reply.set_all_done(true);
    reply.set_lead(lead);
    return reply;
  }
  if (done.deadline > now) return std::nullopt;
  reply.set_waiting_for(job_.finishing() && !finished_saving() ? WaitingForLastCheckpoint() : job_.WaitingFor(now));
  return reply;
}

Chief::TakeRunAnswer Chief::AnswerTo(const WaitingCalls<v1::TakeRunReply>::Call& take, TimePoint now) {
  if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
  const Member* const member = job_.Find(take.rank, take.incarnation);
  if (member == nullptr) return FencedError(take.rank);
  const absl::StatusOr<RunDealer::Deal> deal = job_.TakeRun(*member, take.number, now);
  if (!deal.ok()) return deal.status();
  v1::TakeRunReply reply;
  switch (deal->kind) {
    case RunDealer::Deal::Kind::kRun:
      reply.set_outcome(v1::TakeRunReply::RUN);
      reply.set_run(deal->run);
      return reply;
    case RunDealer::Deal::Kind::kDone:
      reply.set_outcome(v1::TakeRunReply::DONE);
      return reply;
    case RunDealer::Deal::Kind::kWait:
      break;
  }
  // Others may be waiting for the runs that it has not finished itself.
  const bool has_open = job_.runs().dealer().HasOpen({.rank = take.rank, .incarnation = take.incarnation});
  if (!has_open && take.deadline > now) return std::nullopt;
  reply.set_outcome(v1::TakeRunReply::WAIT);
  reply.set_waiting_for(WaitingForRuns(job_, now));
  return reply;
}

// ---- Changing hyperparameters.

void Chief::SetHyperparameters(const v1::SetHyperparametersRequest& request, TimePoint now, TimePoint deadline,
                               SetCallback callback) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  absl::StatusOr<JobState::Setting> setting = job_.CheckSet(request);
  if (setting.ok() && set_callback_) {
    setting = absl::ResourceExhaustedError(
        absl::StrCat("another change is under way: ", ToString(setting_.values, setting_.schedule)));
  }
  if (!setting.ok()) return outbox_.Add([callback, status = setting.status()] { callback(status); });
  spdlog::info("asked to set {}", ToString(setting->values, setting->schedule));
  setting_ = *std::move(setting);
  set_callback_ = std::move(callback);
  set_deadline_ = deadline;
  set_begun_ = false;
  MoveSet(now);
}

void Chief::MoveSet(TimePoint now) {
  if (!set_callback_ || set_begun_) return;
  if (!cut_.idle()) {
    if (now >= set_deadline_) AnswerSet(absl::DeadlineExceededError("nothing is changed: a checkpoint is being taken"));
    return;
  }
  set_begun_ = true;
  v1::Cut commit;
  ToProto(setting_.values, commit.mutable_hyperparameters());
  if (setting_.schedule.has_value()) *commit.mutable_schedule() = ToProto(*setting_.schedule);
  // One ahead of any version that a shard can have begun: decisions and this message come to it in one order.
  if (job_.names_sets()) commit.set_version(job_.mode().step() + 2);
  const bool freeze = !job_.names_sets() && job_.shards().size() > 1;
  TellCut(cut_.Begin(std::move(commit), freeze, now, set_deadline_));
}

void Chief::TellCut(const v1::Cut& cut) {
  if (cut.phase() == v1::Cut::COMMIT && cut.checkpoint() == 0) job_.OnSet(setting_);
  // A change of the very version that a checkpoint is of is part of it.
  const bool is_saved = cut.checkpoint() > 0 || (cut.has_version() && cut.version() == checkpoint_version_);
  if (cut.phase() == v1::Cut::COMMIT && is_saved) saved_job_ = job_.Save();
  v1::ChiefUpdate update;
  *update.mutable_cut() = cut;
  Broadcast(update);
}

void Chief::MoveCut(const CutCoordinator::Outcome& outcome) {
  if (outcome.tell.has_value()) TellCut(*outcome.tell);
  if (!outcome.ended.has_value()) return;
  if (!set_callback_ || !set_begun_) {  // It was a checkpoint's: its parts are being written.
    // Its round may have ended before, as one that took too long.
    if (!outcome.ended->ok() && !rounds_.idle()) EndCheckpoint(outcome.ended->status(), Now());
    return;
  }
  if (!outcome.ended->ok()) return AnswerSet(outcome.ended->status());
  v1::SetHyperparametersReply reply;
  for (const uint64_t version : **outcome.ended) {
    v1::ShardVersion* const shard = reply.add_shards();
    shard->set_shard(static_cast<uint32_t>(reply.shards_size() - 1));
    shard->set_version(version);
  }
  AnswerSet(reply);
}

void Chief::AnswerSet(const absl::StatusOr<v1::SetHyperparametersReply>& reply) {
  if (!reply.ok())
    spdlog::warn("setting {}: {}", ToString(setting_.values, setting_.schedule), Message(reply.status()));
  outbox_.Add([callback = std::exchange(set_callback_, nullptr), reply] { callback(reply); });
}

}  // namespace ps
