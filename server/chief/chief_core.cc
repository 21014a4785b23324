#include "server/chief/chief_core.h"

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

constexpr size_t kMaxHostBytes = 256;     // The log shows no more.
constexpr size_t kMaxJoinsPerWorker = 4;  // That wait for their answer.
constexpr size_t kMaxBusyBytes = 256;
constexpr std::chrono::seconds kSayRefusedEvery(1);  // Whoever asks is told each time.

void AddDecisions(const std::vector<StepSet>& sets, uint64_t dropped_samples, v1::ChiefUpdate& update) {
  for (const StepSet& set : sets) {
    v1::StepDecision* decision = update.add_decisions();
    decision->set_step(set.step);
    decision->set_dropped_samples(dropped_samples);
    for (const uint32_t rank : set.ranks) decision->add_ranks(rank);
    for (const uint64_t step : set.steps) decision->add_steps(step);
  }
}

}  // namespace

ChiefCore::ChiefCore(const ChiefOptions& options, TimePoint now)
    : job_(options, MakeMode(options.mode, options.most_workers())),
      shard_streams_(options.num_shards),
      refused_joins_(kSayRefusedEvery),
      cut_(options.num_shards, options.cut_timeout),
      rounds_(options.checkpoints.value_or(ChiefOptions::Checkpoints()).every, options.num_shards,
              options.checkpoints.value_or(ChiefOptions::Checkpoints()).next_number) {
  if (takes_checkpoints()) kept_.assign(options.checkpoints->complete.begin(), options.checkpoints->complete.end());
  const RestoredJob* const restored = job_.restored();
  if (restored == nullptr || !restored->is_own) return;
  rounds_.Committed(restored->manifest.version(), now);
  checkpoint_path_ = restored->path;
  saved_the_end_ = restored->manifest.finished;
}

// ---- Shards

absl::Status ChiefCore::RegisterShard(uint64_t connection, const v1::Registration& registration, TimePoint now) {
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
  Add(shard_streams_.Open(connection, registration));
  if (!job_.ended()) ChangeView(now);
  return absl::OkStatus();
}

absl::Status ChiefCore::CheckCheckpoints(const v1::Registration& registration) const {
  const std::string who = absl::StrCat("shard ", registration.shard());
  if (takes_checkpoints() && registration.takes_no_checkpoints()) {
    return FailedPrecondition(who, " was started without --checkpoint_dir, and the chief with --checkpoint_dir=",
                              job_.options().checkpoints->dir,
                              ": no checkpoint would be complete; start it with this folder, or its own");
  }
  return job_.CheckDescent(registration.known_checkpoints(), who);
}

absl::Status ChiefCore::CheckResumes(const v1::Registration& registration) const {
  if (job_.superseded()) return job_.Serving();
  const uint64_t generation = job_.options().generation;
  if (registration.resumes() == generation && shard_streams_.CanResume(registration)) return absl::OkStatus();
  return absl::NotFoundError(
      registration.resumes() == generation
          ? "the chief cannot resume this shard's stream"
          : absl::StrCat("the chief was started again, or went back to a checkpoint: generation ",
                         registration.resumes(), " is over"));
}

void ChiefCore::EndIfLost(const v1::Registration& registration, TimePoint now) {
  if (!takes_checkpoints()) return;
  const uint32_t shard = registration.shard();
  if (registration.generation() > job_.options().generation) {
    return GoBack({.reason = absl::StrCat("shard ", shard, " has heard of a later generation"),
                   .damaged = "",
                   .heard_of = registration.generation()},
                  now);
  }
  const bool lost = job_.shards()[shard].ever_registered && !job_.shards()[shard].registered;
  if (!lost || (job_.phase() != v1::PHASE_RUNNING && rounds_.idle())) return;
  GoBack(
      {.reason = absl::StrCat("server ", shard, " at ", registration.address(), " was started again"), .damaged = ""},
      now);
}

void ChiefCore::OnShardGone(uint32_t shard, uint64_t connection, TimePoint now) {
  if (shard_streams_.Close(shard, connection)) job_.OnShardGone(shard, now);
}

void ChiefCore::OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now) {
  std::optional<std::vector<ToShard>> received = shard_streams_.Receive(shard, report);
  const bool is_new = received.has_value();
  if (is_new) Add(*std::move(received));
  if (report.has_status()) {  // It says nothing else.
    v1::ShardStatusReply status = report.status();
    status.set_shard(shard);
    return job_.progress().OnShardStatus(std::move(status));
  }
  if (!is_new) return;
  const JobState::ReportOutcome outcome = job_.OnReport(shard, report, now);
  TellDecisions(outcome.decided);
  for (const v1::NormTotals& totals : outcome.norms) {
    v1::ChiefUpdate update;
    *update.add_norms() = totals;
    Add(shard_streams_.Broadcast(update));
  }
  if (report.has_cut()) MoveCut(cut_.OnReport(shard, report.cut(), now), now);
  if (report.has_checkpoint()) OnCheckpointWritten(shard, report.checkpoint(), now);
  if (!report.restore_failure().empty() && job_.restored() != nullptr) {
    GoBack({.reason = report.restore_failure(), .damaged = job_.restored()->path}, now);
  }
  MoveCheckpoint(now);
  if (outcome.view_is_due) return ChangeView(now);
  AnswerTakes(now);  // Runs may have come back.
  if (!outcome.view_in_force) return;
  AnswerJoins(now);
  if (job_.phase() == v1::PHASE_GATHERING) TellMembers(now);  // The initialiser, once all know it.
}

void ChiefCore::TellDecisions(const std::vector<StepSet>& decided) {
  if (decided.empty()) return;
  v1::ChiefUpdate update;
  AddDecisions(decided, job_.dropped_samples(), update);
  Add(shard_streams_.Broadcast(update));
}

void ChiefCore::ChangeView(TimePoint now) {
  MoveStandbys(now);
  const std::vector<StepSet> decided = job_.NextView(now);
  v1::ChiefUpdate update;
  *update.mutable_view() = MakeView(job_, now);
  AddDecisions(decided, job_.dropped_samples(), update);
  Add(shard_streams_.Broadcast(update, [this](v1::View* view) { AddModel(job_, view); }));
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
  AnswerReduces(now);
  TellMembers(now);
  if (job_.ended()) AbandonCuts();
  MoveCheckpoint(now);
  if (!job_.ended() || std::exchange(told_end_, job_.phase()) == job_.phase()) return;
  Add(Ended{.phase = job_.phase(), .failure = job_.phase() == v1::PHASE_FINISHED ? end_not_saved_ : job_.failure()});
}

void ChiefCore::TellMembers(TimePoint now) {
  for (auto stream = told_.begin(); stream != told_.end();) {
    auto& [watch, told] = *stream;
    const Member* const member = job_.members().FindWatch(watch);
    if (member == nullptr) {
      Add(ToMember{.watch = watch, .state = std::nullopt});
      stream = told_.erase(stream);
      continue;
    }
    const News news = {.phase = job_.phase(),
                       .initialise = job_.MayInitialise(member->rank),
                       .lead = job_.IsLead(*member),
                       .leave = member->draining,
                       .checkpoint_version = job_.checkpoint_version()};
    if (told != news) Add(ToMember{.watch = watch, .state = MakeMemberState(job_, *member, now)});
    told = news;
    ++stream;
  }
}

// ---- Workers

uint64_t ChiefCore::Join(uint64_t call, const v1::JoinRequest& request, TimePoint now, TimePoint deadline) {
  if (job_.HasToWait(request, now)) {
    const bool known = standbys_.Has(request);
    absl::Status good = job_.CheckJoin(request, /*room=*/true);
    if (good.ok() && !known && standbys_.size() >= job_.options().max_standbys) {
      const size_t others = standbys_.size();
      good = FailedPrecondition(job_.WhyItWaits(request, now),
                                others > 0 ? absl::StrCat(", and ", others, " more stand by (--max_standbys)") : "");
    }
    if (!good.ok()) {
      RefuseJoin(call, request, good, now);
      return 0;
    }
    const uint64_t replaced = standbys_.Add(call, request, deadline, now);
    const auto again = absl::CancelledError("the worker asked again");
    if (replaced != 0) Add(Answer<v1::JoinReply>{.call = replaced, .reply = again});
    if (!known) {
      spdlog::info("a worker on {} stands by, one of {}: {}", Printable(request.host(), kMaxHostBytes),
                   standbys_.size(), job_.WhyItWaits(request, now));
    }
    return call;
  }
  EndStandby(request.join_request_id(), absl::CancelledError("the worker asked again"));
  const bool room = joins_.size() < kMaxJoinsPerWorker * job_.options().most_workers();
  const absl::StatusOr<JobState::Joined> joined = job_.Join(request, room, now);
  if (!joined.ok()) {
    RefuseJoin(call, request, joined.status(), now);
    return 0;
  }
  Admit(call, *joined, deadline);
  job_.NewcomersAreDue() ? ChangeView(now) : AnswerJoins(now);
  return call;
}

void ChiefCore::RefuseJoin(uint64_t call, const v1::JoinRequest& request, const absl::Status& why, TimePoint now) {
  // A layout that the chief does not have is told now.
  const bool refused = request.layout_hash().empty() || !absl::IsNotFound(why);
  const std::optional<uint64_t> left_out = refused ? refused_joins_.Admit(now) : std::nullopt;
  if (left_out.has_value()) {
    const std::string others = *left_out == 0 ? "" : absl::StrCat(" (", *left_out, " other joins before it)");
    spdlog::warn("a worker on {} was refused: {}{}", Printable(request.host(), kMaxHostBytes), Message(why), others);
  }
  Add(Answer<v1::JoinReply>{.call = call, .reply = why});
}

void ChiefCore::Admit(uint64_t call, const JobState::Joined& joined, TimePoint deadline) {
  joins_.Add({.number = call,
              .rank = joined.member.rank,
              .incarnation = joined.member.incarnation,
              .waits_for = joined.view,
              .deadline = deadline});
}

void ChiefCore::EndStandby(uint64_t join_request_id, const absl::Status& why) {
  const uint64_t call = standbys_.Remove(join_request_id);
  if (call != 0) Add(Answer<v1::JoinReply>{.call = call, .reply = why});
}

void ChiefCore::MoveStandbys(TimePoint now) {
  while (standbys_.size() > 0) {
    const auto may = [&](const v1::JoinRequest& request) { return job_.WhyItWaits(request, now).empty(); };
    const std::optional<Standbys::Standby> standby = standbys_.TakeFirst(may);
    if (!standby.has_value()) break;
    const absl::StatusOr<JobState::Joined> joined = job_.Join(standby->request, /*room=*/true, now);
    joined.ok() ? Admit(standby->call, *joined, standby->call_ends)
                : RefuseJoin(standby->call, standby->request, joined.status(), now);
  }
  for (auto late = standbys_.EndLate(now); late.has_value(); late = standbys_.EndLate(now)) {
    const auto why = absl::StrCat("standing by: ", job_.WhyItWaits(late->request, now));
    Add(Answer<v1::JoinReply>{.call = late->call, .reply = absl::DeadlineExceededError(why)});
  }
}

void ChiefCore::OnLayout(const std::string& hash, std::shared_ptr<const Layout> layout) {
  if (layout == nullptr) return job_.told_layouts().End();
  job_.told_layouts().Add(hash, std::move(layout));
}

void ChiefCore::OnJoinGone(uint64_t call, TimePoint now) {
  if (standbys_.Gone(call)) {
    return Add(Answer<v1::JoinReply>{.call = call, .reply = absl::CancelledError("the caller disconnected")});
  }
  const std::optional<WaitingCall> gone = joins_.Take(call);
  if (!gone.has_value()) return;
  Add(Answer<v1::JoinReply>{.call = call, .reply = absl::CancelledError("the caller disconnected")});
  if (joins_.Has(gone->rank, gone->incarnation)) return;
  // A caller whose time is up goes away as well, before the answer if this machine is busy. It asks again.
  Member* const member = job_.Find(gone->rank, gone->incarnation);
  if (member != nullptr) gone->deadline <= now ? job_.OnJoinLate(member, now) : job_.OnJoinGone(member, now);
}

absl::StatusOr<v1::HeartbeatReply> ChiefCore::Heartbeat(const v1::HeartbeatRequest& request, TimePoint now) {
  const uint64_t generation = job_.options().generation;
  const bool is_over = request.id().job() == job_.options().job && request.id().generation() != generation;
  if (is_over || job_.ended()) {
    v1::HeartbeatReply end;
    end.set_phase(job_.phase());
    end.set_failure(job_.failure());
    if (is_over) end.set_generation(generation);
    return end;
  }
  PS_ASSIGN_OR_RETURN(const auto member, job_.Hear(request.id(), now));
  PS_RETURN_IF_ERROR(
      CheckText(absl::StrCat("rank ", request.id().rank(), ": busy_with"), request.busy_with(), kMaxBusyBytes));
  if (job_.OnHeartbeat(member, request, now)) ChangeView(now);
  return MakeMemberState(job_, *member, now);
}

absl::Status ChiefCore::Watch(uint64_t watch, const v1::WatchRequest& request, TimePoint now) {
  PS_ASSIGN_OR_RETURN(const auto member, job_.Hear(request.id(), now));
  job_.OnWatchOpened(member, watch);
  told_[watch] = {};
  TellMembers(now);
  return absl::OkStatus();
}

void ChiefCore::OnWatchGone(uint64_t watch, TimePoint now) {
  told_.erase(watch);
  job_.OnWatchGone(watch, now);
}

void ChiefCore::Done(uint64_t call, const v1::DoneRequest& request, TimePoint now, TimePoint deadline) {
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  if (!member.ok()) return Add(Answer<v1::DoneReply>{.call = call, .reply = member.status()});
  Add(dones_.Replace(
      {.number = call, .rank = (*member)->rank, .incarnation = (*member)->incarnation, .deadline = deadline}));
  job_.OnDone(*member, request.counts_as_empty(), now) ? ChangeView(now) : AnswerDones(now);
}

void ChiefCore::TakeRun(uint64_t call, const v1::TakeRunRequest& request, TimePoint now, TimePoint deadline) {
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  const absl::Status taken = member.ok() ? job_.OnTakeRun(**member, request) : member.status();
  if (!taken.ok()) return Add(Answer<v1::TakeRunReply>{.call = call, .reply = taken});
  Add(takes_.Replace({.number = call,
                      .rank = (*member)->rank,
                      .incarnation = (*member)->incarnation,
                      .waits_for = request.number(),
                      .deadline = deadline}));
  AnswerTakes(now);
}

void ChiefCore::Reduce(uint64_t call, const v1::ReduceRequest& request, TimePoint now, TimePoint deadline) {
  const absl::StatusOr<Member*> member = job_.Hear(request.id(), now);
  const absl::Status brought = member.ok() ? job_.OnReduce(**member, request, now) : member.status();
  if (!brought.ok()) return Add(Answer<v1::ReduceReply>{.call = call, .reply = brought});
  Add(reduces_.Replace({.number = call,
                        .rank = (*member)->rank,
                        .incarnation = (*member)->incarnation,
                        .waits_for = request.number(),
                        .deadline = deadline}));
  AnswerReduces(now);
}

absl::Status ChiefCore::Leave(const v1::LeaveRequest& request, TimePoint now) {
  EndStandby(request.join_request_id(), absl::CancelledError("the worker cancelled its join"));
  const absl::StatusOr<bool> view_is_due = job_.Leave(request, now);
  if (view_is_due.ok()) *view_is_due ? ChangeView(now) : TellMembers(now);
  return view_is_due.status();
}

absl::StatusOr<v1::WorkerFlagsReply> ChiefCore::FlagsFor(const v1::WorkerFlagsRequest& request) const {
  PS_RETURN_IF_ERROR(job_.Serving());
  v1::WorkerFlagsReply reply;
  reply.set_job(job_.options().job);
  const WorkerFlags& flags = job_.FlagsFor(request.has_rank() ? std::optional<uint32_t>(request.rank()) : std::nullopt);
  reply.mutable_flags()->insert(flags.begin(), flags.end());
  return reply;
}

absl::StatusOr<v1::DrainReply> ChiefCore::Drain(const v1::DrainRequest& request, TimePoint now) {
  PS_ASSIGN_OR_RETURN(const auto member, job_.Drain(request.worker()));
  TellMembers(now);
  v1::DrainReply reply;
  reply.set_rank(member->rank);
  reply.set_name(member->name);
  reply.set_host(member->host);
  return reply;
}

absl::StatusOr<v1::ShutdownReply> ChiefCore::ShutDown(TimePoint now) {
  PS_RETURN_IF_ERROR(job_.ShutDown());
  ChangeView(now);
  v1::ShutdownReply reply;
  reply.set_job(job_.options().job);
  return reply;
}

// ---- Time, and the end

void ChiefCore::Tick(TimePoint now) {
  if (const uint64_t left_out = refused_joins_.TakeLeftOut(now); left_out > 0) {
    spdlog::warn("{} other joins were refused", left_out);
  }
  MoveCut(cut_.CheckTimes(now), now);
  MoveSet(now);
  MoveCheckpoint(now);
  CheckTooFew(now);
  MoveStandbys(now);
  const auto is_joining = [this](const Member& member) { return joins_.Has(member.rank, member.incarnation); };
  TellDecisions(job_.Tick(now));
  if (job_.CheckTimes(now, is_joining)) return ChangeView(now);
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
  AnswerReduces(now);
}

void ChiefCore::CheckTooFew(TimePoint now) {
  const std::optional<std::string> why = job_.TooFewForTooLong(now);
  if (!why.has_value()) return giving_up_.reset();
  if (takes_checkpoints() && !giving_up_.has_value()) {
    if (!cut_.idle()) return;
    if (!rounds_.idle()) AbandonRound();
    BeginCheckpoint(/*at_once=*/job_.mode().coordinated(), now);
    giving_up_ = rounds_.number();
  }
  const bool writes = giving_up_.has_value() && rounds_.number() == giving_up_;
  if (!writes) Fail(*why, now);
}

void ChiefCore::Fail(const std::string& reason, TimePoint now) {
  if (job_.Fail(reason)) ChangeView(now);
}

v1::StatusReply ChiefCore::Status(TimePoint now, bool with_layout) const {
  v1::StatusReply status = MakeStatus(job_, now);
  if (with_layout && job_.plan().has_value()) *status.mutable_layout() = ToProto(job_.plan()->layout());
  if (takes_checkpoints()) *status.mutable_checkpoints() = CheckpointsStatus(now);
  status.set_standbys(static_cast<uint32_t>(standbys_.size()));
  return status;
}

std::string ChiefCore::LongWait(TimePoint now, std::chrono::nanoseconds longer) const {
  const bool for_long = job_.phase() == v1::PHASE_RUNNING && now - job_.last_progress() > longer;
  return job_.phase() == v1::PHASE_GATHERING || for_long ? job_.WaitingFor(now) : "";
}

// ---- What the chief answers to calls that wait: joins, ends, requests for runs and reductions. Nothing: the call has
// to wait.

void ChiefCore::AnswerJoins(TimePoint now) {
  Add(joins_.AnswerWhere([&](const WaitingCall& join) -> std::optional<absl::StatusOr<v1::JoinReply>> {
    Member* const member = job_.Find(join.rank, join.incarnation);
    if (const absl::Status serving = job_.Serving(); !serving.ok()) {
      if (member != nullptr) job_.Dismiss(join.rank);  // This answer tells it.
      return serving;
    }
    if (member == nullptr) return absl::FailedPreconditionError("the worker left, or another joined under its name");
    if (job_.MayAnswerJoin(join.waits_for)) {
      job_.Begin(member, now);
      return MakeJoinReply(job_, *member);
    }
    if (join.deadline > now) return std::nullopt;
    job_.OnJoinLate(member, now);
    return absl::DeadlineExceededError("joining: " + job_.WaitingFor(now));
  }));
}

void ChiefCore::AnswerDones(TimePoint now) {
  Add(dones_.AnswerWhere([&](const WaitingCall& done) -> std::optional<absl::StatusOr<v1::DoneReply>> {
    if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
    const Member* const member = job_.Find(done.rank, done.incarnation);
    if (member == nullptr) return job_.FencedError(done.rank, done.incarnation);
    v1::DoneReply reply;
    const bool lead = job_.IsLead(*member);
    const bool saves = job_.finishing() && takes_checkpoints() && !saved_the_end_;
    if (job_.finishing() && !saves && (lead || job_.lead_left())) {
      reply.set_all_done(true);
      reply.set_lead(lead);
      return reply;
    }
    if (done.deadline > now) return std::nullopt;
    const std::string failed = checkpoint_failure_.empty() ? "" : "; tried again, since " + checkpoint_failure_;
    reply.set_waiting_for(saves ? "the last checkpoint to be complete" + failed : job_.WaitingFor(now));
    return reply;
  }));
}

void ChiefCore::AnswerTakes(TimePoint now) {
  // Who has waited meanwhile asks again: others may wait for a contribution of it now.
  const bool goes_on = std::exchange(was_paused_, job_.paused()) && !was_paused_;
  Add(takes_.AnswerWhere([&](const WaitingCall& take) -> std::optional<absl::StatusOr<v1::TakeRunReply>> {
    if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
    const Member* const member = job_.Find(take.rank, take.incarnation);
    if (member == nullptr) return job_.FencedError(take.rank, take.incarnation);
    absl::StatusOr<v1::TakeRunReply> reply = job_.TakeRun(*member, take.waits_for, now);
    if (!reply.ok() || reply->outcome() != v1::TakeRunReply::WAIT) return reply;
    // Others may be waiting for the runs that it has not finished itself.
    const bool has_open = job_.runs().HasOpen({.rank = take.rank, .incarnation = take.incarnation});
    if (!has_open && !goes_on && take.deadline > now) return std::nullopt;
    reply->set_waiting_for(reply->paused() ? job_.WaitingFor(now) : WaitingForRuns(job_, now));
    return reply;
  }));
  Add(job_.runs().TakeRecords());
  TellDecisions(job_.SetIdle(takes_.Ranks(), now));
}

void ChiefCore::AnswerReduces(TimePoint now) {
  job_.MoveReductions();
  Add(reduces_.AnswerWhere([&](const WaitingCall& call) -> std::optional<absl::StatusOr<v1::ReduceReply>> {
    if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
    const Member* const member = job_.Find(call.rank, call.incarnation);
    if (member == nullptr) return job_.FencedError(call.rank, call.incarnation);
    if (const auto reduced = job_.Reduced(*member, call.waits_for); reduced != nullptr) return *reduced;
    if (member->done) return FailedPrecondition(member->ToString(), " is done, and brings nothing to a reduction");
    if (call.deadline > now) return std::nullopt;
    v1::ReduceReply reply;
    reply.set_waiting_for(job_.WaitingForReduction(now));
    return reply;
  }));
}

// ---- Changing hyperparameters.

void ChiefCore::SetHyperparameters(uint64_t call, const v1::SetHyperparametersRequest& request, TimePoint now,
                                   TimePoint deadline) {
  absl::StatusOr<JobState::Setting> setting = job_.CheckSet(request);
  if (setting.ok() && change_.has_value()) {
    setting = ResourceExhausted("another change is under way: ",
                                ToString(change_->setting.values, change_->setting.schedule));
  }
  if (!setting.ok()) return Add(Answer<v1::SetHyperparametersReply>{.call = call, .reply = setting.status()});
  spdlog::info("asked to set {}", ToString(setting->values, setting->schedule));
  change_ = {.call = call, .setting = *std::move(setting), .deadline = deadline};
  MoveSet(now);
}

void ChiefCore::MoveSet(TimePoint now) {
  if (!change_.has_value() || change_->begun) return;
  if (!cut_.idle()) {
    if (now < change_->deadline) return;
    return AnswerSet(absl::DeadlineExceededError("nothing is changed: a checkpoint is being taken"));
  }
  change_->begun = true;
  v1::Cut commit;
  ToProto(change_->setting.values, commit.mutable_hyperparameters());
  if (change_->setting.schedule.has_value()) *commit.mutable_schedule() = ToProto(*change_->setting.schedule);
  // One ahead of any version that a shard can have begun: decisions and this message come to it in one order.
  if (job_.names_sets()) commit.set_version(job_.first_not_begun());
  const bool freeze = !job_.names_sets() && job_.shards().size() > 1;
  TellCut(cut_.Begin(std::move(commit), freeze, now, change_->deadline));
}

void ChiefCore::TellCut(const v1::Cut& cut) {
  if (cut.phase() == v1::Cut::COMMIT && cut.checkpoint() == 0) {
    job_.OnSet(change_->setting);
    changed_from_ = cut.version();
  }
  // A change of the very version that a checkpoint is of is part of it.
  const bool is_saved = cut.checkpoint() > 0 || (cut.has_version() && cut.version() == checkpoint_version_);
  if (cut.phase() == v1::Cut::COMMIT && is_saved) saved_job_ = job_.Save();
  v1::ChiefUpdate update;
  *update.mutable_cut() = cut;
  Add(shard_streams_.Broadcast(update));
}

void ChiefCore::MoveCut(const CutCoordinator::Outcome& outcome, TimePoint now) {
  if (outcome.tell.has_value()) TellCut(*outcome.tell);
  if (!outcome.ended.has_value()) return;
  if (!change_.has_value() || !change_->begun) {  // It was a checkpoint's: its parts are being written.
    // Its round may have ended before, as one that took too long.
    if (!outcome.ended->ok() && !rounds_.idle()) EndCheckpoint(outcome.ended->status(), now);
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

void ChiefCore::AnswerSet(const absl::StatusOr<v1::SetHyperparametersReply>& reply) {
  const Change& change = *change_;
  if (!reply.ok()) {
    spdlog::warn("setting {}: {}", ToString(change.setting.values, change.setting.schedule), Message(reply.status()));
  }
  Add(Answer<v1::SetHyperparametersReply>{.call = change.call, .reply = reply});
  change_.reset();
}

}  // namespace ps
