#include "server/chief/job_state.h"

#include <algorithm>
#include <vector>

#include <spdlog/spdlog.h>
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/problems.h"
#include "common/status.h"
#include "common/text.h"
#include "server/base/first_of.h"

namespace ps {
namespace {

constexpr size_t kMaxReasonBytes = 512;     // That a worker gives for leaving.
constexpr size_t kMaxCancelledJoins = 256;  // That are remembered.
// A worker on a busy machine opens its stream this long after its join's answer at the latest.
constexpr std::chrono::seconds kOpenWatchMin(5);
constexpr std::chrono::seconds kSayEvery(10);  // That training waits for workers.

}  // namespace

JobState::JobState(const ChiefOptions& options, std::unique_ptr<Mode> mode)
    : options_(options),
      members_(options.most_workers(), options.lease, options.elastic() ? "--max_workers" : "--num_workers"),
      replacements_(options.replacement_timeout),
      shards_(options.job, options.num_shards, options.settings),
      terms_(MakeTerms(options)),
      steps_(std::move(mode), options.num_shards),
      norms_(options.num_shards),
      progress_(JobProgress::TermsOf(steps_.mode()), options.counts),
      runs_(options.hands_out_runs, options.returns_stale_runs, steps_.mode().policy()),
      own_data_(options.num_workers) {
  if (!options_.checkpoints.has_value()) return;
  awaits_first_checkpoint_ = restored() == nullptr || !restored()->is_own;
  if (restored() != nullptr) Restore(*restored());
}

JobTerms JobState::MakeTerms(const ChiefOptions& options) {
  return {options.job, options.num_shards, options.max_shard_elements,
          OptimizerTerms(MakeSetup(options.optimizer, options.hyperparameters, options.clip, options.mode),
                         options.mode, options.num_shards, options.wire.pushes.top_k > 0),
          options.schedule};
}

absl::Status JobState::Serving() const {
  if (superseded()) return absl::UnavailableError(superseded_);
  if (phase_ == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + failure_);
  if (phase_ == v1::PHASE_FINISHED) return JobFinished();
  if (phase_ == v1::PHASE_SHUT_DOWN) return JobShutDown();
  return absl::OkStatus();
}

bool JobState::MayInitialise(uint32_t rank) const {
  return initialiser_ == rank && !shards_.AllInitialised() && shards_.AllAcknowledge(initialiser_view_);
}

bool JobState::MayAnswerJoin(uint64_t view) const {
  return tells_layout() && shards_.AllAcknowledge(terms_.own_data() ? std::max(view, layout_view_) : view);
}

bool JobState::IsLead(const Member& member) const {
  if (lead_left_) return false;
  if (phase_ == v1::PHASE_GATHERING) return member.rank == initialiser_.value_or(0);
  return members_.Lead() != nullptr && members_.Lead()->rank == member.rank;
}

// ---- Shards

absl::Status JobState::RegisterShard(const v1::Registration& registration, TimePoint now) {
  PS_RETURN_IF_ERROR(Serving());
  PS_RETURN_IF_ERROR(shards_.Register(registration, phase_ == v1::PHASE_RUNNING, now));
  spdlog::info("shard {} at {} registered", registration.shard(), registration.address());
  return absl::OkStatus();
}

void JobState::ResumeShard(uint32_t shard, TimePoint now) {
  last_progress_ = now;
  shards_.Resume(shard);
  spdlog::info("shard {} at {}: connected again", shard, shards_[shard].address);
}

void JobState::OnShardGone(uint32_t shard, TimePoint now) {
  shards_.Gone(shard, now);
  if (over()) return;
  spdlog::warn("shard {} at {}: connection lost", shard, shards_[shard].address);
}

JobState::ReportOutcome JobState::OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now) {
  const auto layout_view = plan().has_value() ? std::optional<uint64_t>(layout_view_) : std::nullopt;
  const ShardTable::News news = shards_.OnReport(shard, report, layout_view);
  if (news.applied) last_progress_ = now;
  if (news.applied) {
    replacements_.OnProgress();
    progress_.OnVersion(shards_.lowest_applied_version(), now);
    if (!mode().synchronous()) progress_.OnStep(shards_.highest_step());
  }
  if (shard == 0) {
    dropped_samples_ = std::max(dropped_samples_, report.dropped_samples());
    told_learning_rate_ = report.has_learning_rate() ? std::optional<float>(report.learning_rate()) : std::nullopt;
  }
  runs_.OnAcknowledged([this](uint64_t view) { return shards_.AllAcknowledge(view); },
                       [this](const RunTaker& taker) { return shards_.LeftRuns(taker.rank, taker.incarnation); });
  if (!report.failure().empty() && !ended()) {
    not_finite_ = report.not_finite();
    SetPhase(v1::PHASE_FAILED, report.failure());
    return {.view_is_due = true, .decided = {}, .norms = {}};
  }
  ReportOutcome outcome;
  outcome.view_in_force = news.in_force;
  outcome.view_is_due = (news.initialised && shards_.AllInitialised()) || NewcomersAreDue();
  if (phase_ != v1::PHASE_RUNNING) return outcome;
  for (const v1::PushDone& done : report.complete()) {
    StepCoordinator::Outcome complete = steps_.Complete(shard, done.incarnation(),
                                                        {.rank = done.rank(),
                                                         .step = done.step(),
                                                         .samples = done.samples(),
                                                         .at = now,
                                                         .took = std::chrono::microseconds(done.took_us())},
                                                        members_);
    if (complete.news) last_progress_ = last_push_ = now;
    outcome.decided.insert(outcome.decided.end(), complete.decided.begin(), complete.decided.end());
  }
  norms_.OnApplied(shards_.lowest_applied_version());
  for (const v1::NormSums& sums : report.norms()) {
    absl::StatusOr<std::optional<v1::NormTotals>> totals = norms_.OnSums(shard, sums, *plan(), members_);
    if (!totals.ok()) {
      outcome.view_is_due = Fail(Message(totals.status()));
      break;
    }
    if (totals->has_value()) outcome.norms.push_back(*std::move(*totals));
  }
  return outcome;
}

// ---- Members

absl::Status JobState::CheckJoin(const v1::JoinRequest& request, bool room) const {
  PS_RETURN_IF_ERROR(CheckJoinTexts(request));
  PS_RETURN_IF_ERROR(Serving());
  PS_RETURN_IF_ERROR(CheckDescent(request.known_checkpoints(), "this worker"));
  if (finishing_ && !options_.elastic()) {
    return absl::FailedPreconditionError("all workers are done; the job is about to end");
  }
  // Before the model, which differs as well where data do.
  if (request.has_own_data() && request.job() == options_.job) {
    PS_RETURN_IF_ERROR(own_data_.CheckKind(request.own_data()));
  }
  PS_RETURN_IF_ERROR(terms_.CheckSame(request));
  PS_RETURN_IF_ERROR(CheckFeatures(request));
  if (!room) return absl::ResourceExhaustedError("too many workers are joining at once");
  if (std::count(cancelled_joins_.begin(), cancelled_joins_.end(), request.join_request_id()) > 0) {
    return absl::CancelledError("the worker cancelled its join");
  }
  return absl::OkStatus();
}

std::optional<uint32_t> JobState::Grant(std::optional<uint32_t> claim, const std::string& name) const {
  if (!options_.elastic() || !claim.has_value()) return claim;
  return members_.IsFree(*claim) && members_.FindName(name) == nullptr ? claim : std::nullopt;
}

std::string JobState::WhyItWaits(const v1::JoinRequest& request, TimePoint now) const {
  if (over()) return "";
  std::vector<std::string> why;
  if (finishing_) {
    why.emplace_back("all workers are done, and another one is needed only if they are lost");
  } else if (!HasFreeRank()) {
    why.push_back(absl::StrCat("the job has all of its workers (--max_workers=", options_.most_workers(), ")"));
  }
  // Where the job waits for workers, they hold nobody up.
  const bool needed = HasTooFew() || phase_ == v1::PHASE_GATHERING;
  if (std::string bad = needed ? "" : short_lives_.WhyNotYet(request.host(), now); !bad.empty()) {
    why.push_back(std::move(bad));
  }
  return absl::StrJoin(why, "; ");
}

bool JobState::HasToWait(const v1::JoinRequest& request, TimePoint now) const {
  const bool is_new =
      members_.FindName(request.name()) == nullptr && members_.FindJoin(request.join_request_id()) == nullptr;
  if (!options_.elastic() || over() || !is_new) return false;
  if (options_.max_standbys == 0) return finishing_ || !members_.RankForNewcomer().has_value();
  return !WhyItWaits(request, now).empty();
}

absl::StatusOr<JobState::Joined> JobState::Join(const v1::JoinRequest& request, bool room, TimePoint now) {
  PS_RETURN_IF_ERROR(CheckJoin(request, room));
  if (Member* const member = members_.FindJoin(request.join_request_id()); member != nullptr) {
    // The first answer was lost, or is still to come.
    member->last_heard = now;
    member->suspect_since.reset();
    member->watch_due.reset();
    return Joined{.member = *member, .view = member->first_view};
  }
  const std::optional<uint32_t> claim = request.has_rank() ? std::optional<uint32_t>(request.rank()) : std::nullopt;
  const std::string name = request.name().empty() ? ChooseName() : request.name();
  PS_ASSIGN_OR_RETURN(const uint32_t rank, request.yields() ? members_.RankToRejoin(name, request.rank())
                                                            : members_.RankFor(name, Grant(claim, name)));
  if (request.has_own_data()) {
    if (request.yields() && rank != request.rank()) {
      return FailedPrecondition("rank ", request.rank(), " has another owner, and with --data=own ",
                                "this worker's samples are no other rank's");
    }
    PS_RETURN_IF_ERROR(CheckOwnData(rank, request.own_data()));
  }
  if (const Member* const before = members_.At(rank); options_.elastic() && before != nullptr && before->name != name) {
    short_lives_.OnLost(before->host, before->joined, now);
  }
  Member* const joined = members_.Hand(rank, name, request.host(), now);
  if (options_.elastic()) short_lives_.OnJoined(request.host(), now);
  joined->join_request_id = request.join_request_id();
  joined->first_view = view_ + 1;
  has_newcomers_ = true;
  joined->watches = request.watches();
  if (request.yields() && phase_ == v1::PHASE_GATHERING && !rejoining_since_.has_value()) rejoining_since_ = now;
  replacements_.Taken(joined->rank);
  // Whoever takes a rank over does not repeat what its owner did.
  if (phase_ == v1::PHASE_RUNNING && !joined->replaced.empty()) restored_steps_.erase(joined->rank);
  if (!plan().has_value()) layout_view_ = view_ + 1;
  terms_.Fix(request);
  if (request.has_own_data()) AddOwnData(rank, request.own_data());
  const Member& member = *joined;
  if (request.flags_size() > 0) {
    const WorkerFlags flags(request.flags().begin(), request.flags().end());
    flags == terms_.worker_flags() ? (void)own_flags_.erase(member.rank) : (void)(own_flags_[member.rank] = flags);
  }
  spdlog::info("{} joined ({} of {}), incarnation {}{}{}", member.ToString(), members_.members().size(),
               options_.most_workers(), member.incarnation,
               request.has_rank() && rank != request.rank() ? absl::StrCat(", instead of rank ", request.rank()) : "",
               member.replaced.empty() ? "" : absl::StrCat(", and replaces ", member.replaced));
  return Joined{.member = member, .view = member.first_view};
}

absl::Status JobState::CheckFeatures(const v1::JoinRequest& request) const {
  const v1::LocalSteps& local = mode().policy().local_steps();
  const bool parts = local.fragments() > 1 || local.overlap() > 0 || local.mix() > 0;
  const float decay = options_.wire.error_feedback_decay;
  for (const auto& [needed, feature, flags] :
       {std::tuple(decay != 1, "error_feedback_decay", absl::StrCat("--error_feedback_decay=", decay)),
        std::tuple(
            parts, "fragments",
            absl::StrCat("--fragments=", local.fragments(), " --overlap=", local.overlap(), " --mix=", local.mix()))}) {
    const auto& has = request.features();
    if (!needed || std::find(has.begin(), has.end(), feature) != has.end()) continue;
    return FailedPrecondition(flags, ": the worker's client cannot do that");
  }
  return absl::OkStatus();
}

std::string JobState::ChooseName() {
  std::string name;
  do {
    name = absl::StrCat("worker-", ++chosen_names_);
  } while (members_.FindName(name) != nullptr);
  return name;
}

const WorkerFlags& JobState::FlagsFor(std::optional<uint32_t> rank) const {
  static const WorkerFlags none;
  if (phase_ != v1::PHASE_RUNNING && restored() == nullptr) return none;
  const std::optional<uint32_t> granted = Grant(rank, /*name=*/"");
  const auto own = own_flags_.find(granted.value_or(members_.RankForNewcomer().value_or(0)));
  return own == own_flags_.end() ? terms_.worker_flags() : own->second;
}

uint64_t JobState::StartStep() const {
  return std::max(mode().StartStep(shards_.highest_step(), shards_[0].next_version()), restored_highest_);
}

std::optional<uint64_t> JobState::OwnStep(const Member& member) const {
  if (mode().synchronous()) return std::nullopt;
  const auto restored = restored_steps_.find(member.rank);
  if (restored != restored_steps_.end()) return restored->second;
  const bool from_the_start = member.first_step.has_value() || phase_ == v1::PHASE_GATHERING;
  // A checkpoint that has steps of others has all of them: this rank had not pushed.
  if (from_the_start && !restored_steps_.empty() && !StepsAreFree()) return 0;
  if (from_the_start || mode().OnLoss() != LossAction::kWait) return member.first_step;
  return shards_.LeftStep(member.rank);  // Its share is waited for.
}

// Once the view is in force the old owner of the rank is fenced, and the steps that the shards acknowledged it with are
// its last ones.
void JobState::Begin(Member* member, TimePoint now) {
  const std::optional<uint64_t> own = OwnStep(*member);
  member->starts_with_others = !own.has_value() && !mode().synchronous() && phase_ == v1::PHASE_RUNNING;
  // With a fixed share the batch of that step is its own, and nobody else's.
  member->begins_empty = phase_ == v1::PHASE_RUNNING && !member->first_step.has_value() && options_.hands_out_runs &&
                         mode().policy().exact_versions() && !mode().counts_for_any_owner();
  member->start_step = own.value_or(StartStep());
  member->begun = true;
  members_.Change(member, [](Member& changed) { changed.step = changed.start_step; });
  member->last_heard = now;
  if (member->watches && member->watch == 0) {
    member->watch_due = now + std::max<std::chrono::nanoseconds>(options_.reconnect_grace, kOpenWatchMin);
  }
  spdlog::info("{} starts at step {}", member->ToString(), member->start_step);
}

absl::StatusOr<Member*> JobState::Hear(const v1::Identity& id, TimePoint now) {
  PS_RETURN_IF_ERROR(Serving());
  if (id.job() != options_.job || id.generation() != options_.generation) {
    return FailedPrecondition("fenced: generation ", options_.generation, " of job ", options_.job,
                              " is running, not generation ", id.generation(), " of job ", id.job());
  }
  Member* const member = members_.Find(id.rank(), id.incarnation());
  if (member != nullptr) {
    member->last_heard = now;
    return member;
  }
  return FencedError(id.rank(), id.incarnation());
}

absl::Status JobState::FencedError(uint32_t rank, uint64_t incarnation) const {
  const auto owner = members_.members().find(rank);
  return FailedPrecondition(
      "fenced: rank ", rank, ", incarnation ", incarnation, " is no longer a member of the job: ",
      owner == members_.members().end()
          ? "it left or was lost"
          : absl::StrCat("replaced by ", owner->second.ToString(), ", incarnation ", owner->second.incarnation));
}

bool JobState::OnHeartbeat(Member* member, const v1::HeartbeatRequest& heartbeat, TimePoint now) {
  const bool moves = heartbeat.step() != member->step || heartbeat.local_steps() != member->local_steps;
  if (moves || !heartbeat.busy_with().empty()) last_progress_ = now;
  members_.Change(member, [&](Member& changed) { changed.step = heartbeat.step(); });
  if (heartbeat.local_steps() > member->local_steps) progress_.OnBatches(now);
  member->local_steps = heartbeat.local_steps();
  if (heartbeat.has_report()) progress_.OnReport(*member, heartbeat.report(), now);
  return std::exchange(member->busy_with, heartbeat.busy_with()) != heartbeat.busy_with();
}

absl::StatusOr<Member*> JobState::Drain(const std::string& worker) {
  PS_RETURN_IF_ERROR(Serving());
  Member* found = members_.FindName(worker);
  if (uint32_t rank = 0; found == nullptr && absl::SimpleAtoi(worker, &rank)) found = members_.At(rank);
  if (found == nullptr) {
    return NotFound("no worker has the name or rank ", Printable(worker, kMaxReasonBytes),
                    "; there are: ", members_.List());
  }
  if (phase_ == v1::PHASE_RUNNING && !found->done && mode().OnLoss() == LossAction::kFail) {
    return FailedPrecondition(found->ToString(),
                              ": the job would fail without it (--on_worker_loss=fail); it is not asked to leave");
  }
  const auto leaves = [found](const auto& entry) {
    return &entry.second == found || entry.second.draining || entry.second.suspect_since.has_value();
  };
  const bool last = std::all_of(members_.members().begin(), members_.members().end(), leaves);
  if (phase_ == v1::PHASE_RUNNING && !found->done && mode().OnLoss() == LossAction::kContinue && last &&
      !options_.elastic()) {
    return FailedPrecondition(found->ToString(),
                              ": no worker would be left, and the job would fail; it is not asked to leave ",
                              "(ps_ctl shutdown ends a job)");
  }
  found->draining = true;
  spdlog::info("{} is asked to leave", found->ToString());
  return found;
}

void JobState::OnWatchOpened(Member* member, uint64_t watch) {
  members_.Change(member, [watch](Member& changed) { changed.watch = watch; });
  member->watch_due.reset();
  member->suspect_since.reset();  // Only this clears it: a heartbeat may have been on its way when its sender died.
}

void JobState::OnWatchGone(uint64_t watch, TimePoint now) {
  Member* const member = members_.FindWatch(watch);
  if (member == nullptr) return;  // It has opened another one, or is no longer a member.
  members_.Change(member, [](Member& changed) { changed.watch = 0; });
  if (ended()) return Dismiss(member->rank);  // The server need not wait for it.
  member->suspect_since = now;
}

bool JobState::OnDone(Member* member, bool counts_as_empty, TimePoint now) {
  if (member->done) return false;
  members_.Change(member, [](Member& changed) { changed.done = true; });
  member->counts_as_empty = counts_as_empty;
  runs_.FinishAll({.rank = member->rank, .incarnation = member->incarnation});
  last_progress_ = now;
  spdlog::info("{} is done", member->ToString());
  return true;
}

absl::Status JobState::OnTakeRun(const Member& member, const v1::TakeRunRequest& request) {
  if (phase_ != v1::PHASE_RUNNING) return absl::UnavailableError("the job hands out no runs before it is running");
  if (member.done) return FailedPrecondition(member.ToString(), " is done, and takes no runs");
  return runs_.OnRequest({.rank = member.rank, .incarnation = member.incarnation}, request);
}

absl::StatusOr<v1::TakeRunReply> JobState::TakeRun(const Member& member, uint64_t number, TimePoint now) {
  const RunTaker taker = {.rank = member.rank, .incarnation = member.incarnation};
  if (HasTooFew() && !runs_.IsRepeat(taker, number) && !runs_.AllUsed()) {
    v1::TakeRunReply waits;
    waits.set_outcome(v1::TakeRunReply::WAIT);
    waits.set_paused(paused());
    return waits;
  }
  absl::StatusOr<v1::TakeRunReply> reply = runs_.Take(taker, number);
  if (reply.ok() && reply->outcome() == v1::TakeRunReply::RUN) last_progress_ = now;
  return reply;
}

Reductions::Participant JobState::ParticipantOf(const Member& member) const {
  Reductions::Participant participant = {.rank = member.rank, .incarnation = member.incarnation};
  if (member.first_step.has_value()) return participant;
  // It has joined a running job. Where all make the same steps, others may bring something after a step that it has not
  // made, and go on to one for which they wait for it.
  participant.from_step = std::nullopt;
  if (!member.begun) participant.from_step = UINT64_MAX;
  if (member.begun && mode().synchronous()) participant.from_step = member.start_step + (member.begins_empty ? 2 : 1);
  return participant;
}

std::vector<Reductions::Participant> JobState::Participants() const {
  std::vector<Reductions::Participant> participants;
  for (const auto& [rank, member] : members_.members()) {
    if (!member.done) participants.push_back(ParticipantOf(member));
  }
  return participants;
}

absl::Status JobState::OnReduce(const Member& member, const v1::ReduceRequest& request, TimePoint now) {
  PS_RETURN_IF_ERROR(Reductions::Check(request));
  if (phase_ != v1::PHASE_RUNNING) return absl::UnavailableError("the job reduces nothing before it is running");
  if (member.done) return FailedPrecondition(member.ToString(), " is done, and brings nothing to a reduction");
  Reductions::Participant participant = ParticipantOf(member);
  participant.who = member.ToString();
  PS_ASSIGN_OR_RETURN(const bool news, reductions_.Bring(participant, request));
  if (news) last_progress_ = now;
  MoveReductions();
  return absl::OkStatus();
}

std::string JobState::WaitingForReduction(TimePoint now) const {
  if (!reductions_.open()) return "";
  return absl::StrCat(reductions_.What(), ": waiting for ", DescribeMembers(reductions_.Missing(Participants()), now));
}

std::string JobState::DescribeMembers(const std::vector<uint32_t>& ranks, TimePoint now) const {
  return FirstOf(ranks, [&](std::string* out, uint32_t rank) {
    const auto found = members_.members().find(rank);
    if (found == members_.members().end()) return absl::StrAppend(out, "rank ", rank, " (it has no worker)");
    const Member& member = found->second;
    absl::StrAppend(out, "rank ", rank, " (", member.name, " on ", member.host,
                    member.busy_with.empty() ? "" : ", " + member.busy_with, ", last heard from ",
                    FormatSeconds(now - member.last_heard), " ago)");
  });
}

// ---- For who watches the job

RankWait JobState::Waits(TimePoint now) const {
  if (phase_ != v1::PHASE_RUNNING || finishing_) return {};
  if (!steps_.leads()) return progress_.waits();
  if (now - last_push_ < RankWait::kNoticed) return {};
  RankWait wait = {.ranks = steps_.Missing(), .time = now - last_push_};
  return wait.ranks.empty() ? RankWait() : wait;
}

std::optional<std::chrono::nanoseconds> JobState::StuckFor(TimePoint now) const {
  if (phase_ != v1::PHASE_RUNNING || finishing_ || superseded()) return std::nullopt;
  return progress_.StuckFor(now);
}

std::string JobState::Stuck(TimePoint now) const {
  const auto time = StuckFor(now);
  if (!time.has_value()) return "";
  std::vector<uint32_t> missing = Waits(now).ranks;
  std::string who = missing.empty() ? steps_.Incomplete() : "";
  const bool others = !who.empty() || !shards_.Missing().empty() || HasTooFew() || !replacements_.empty() ||
                      !shards_.waiting_for().empty();
  if (missing.empty() && !others) {
    for (const auto& [rank, member] : members_.members()) {
      if (!member.done) missing.push_back(rank);
    }
  }
  if (!missing.empty()) who = "waiting for " + DescribeMembers(missing, now);
  if (who.empty()) who = WaitingFor(now);
  return absl::StrCat("no version for ", FormatSeconds(*time), who.empty() ? "" : "; ", who);
}

void JobState::SayStuck(TimePoint now) {
  const auto time = StuckFor(now);
  if (time.has_value() == stuck_since_.has_value()) return;
  if (time.has_value()) {
    stuck_since_ = now - *time;
    return spdlog::warn("the job is stuck: {}", Stuck(now));
  }
  if (phase_ == v1::PHASE_RUNNING && !finishing_) {
    spdlog::info("the job goes on, after {}", FormatSeconds(now - *stuck_since_));
  }
  stuck_since_.reset();
}

absl::StatusOr<bool> JobState::Leave(const v1::LeaveRequest& request, TimePoint now) {
  const bool by_join = request.join_request_id() != 0;
  if (by_join) {
    cancelled_joins_.push_back(request.join_request_id());
    if (cancelled_joins_.size() > kMaxCancelledJoins) cancelled_joins_.pop_front();
  }
  const Member* const found = by_join ? members_.FindJoin(request.join_request_id())
                                      : members_.Find(request.id().rank(), request.id().incarnation());
  if (ended()) {
    if (found != nullptr) Dismiss(found->rank);  // The server need not wait for it.
    return false;
  }
  if (!by_join) PS_RETURN_IF_ERROR(Hear(request.id(), now).status());
  if (found == nullptr) return false;  // Nobody has the join_request_id.
  const Member member = *found;
  if (!member.done || !request.reason().empty()) {
    LoseMember(member,
               request.reason().empty() ? "left before it was done"
                                        : absl::StrCat("left: ", Printable(request.reason(), kMaxReasonBytes)),
               now);
    not_finite_ = phase_ == v1::PHASE_FAILED && request.not_finite();
    return true;
  }
  spdlog::info("{} left", member.ToString());
  if (finishing_ && IsLead(member)) lead_left_ = true;
  RemoveMember(member);
  if (finishing_ && members_.members().empty()) SetPhase(v1::PHASE_FINISHED, "");
  return true;
}

void JobState::RemoveMember(const Member& member) {
  Dismiss(member.rank);
  own_data_.Remove(member.rank);
  if (phase_ != v1::PHASE_GATHERING || !members_.members().empty() || !plan().has_value()) return;
  if (restored() != nullptr) return;
  // No member is left and nothing was trained: the next worker to join sets model and experiment anew.
  terms_.Reset();
  own_flags_.clear();
  own_data_.Reset();
  initialiser_.reset();
  layout_view_ = view_ + 1;
  shards_.ForgetInitialValues();
}

void JobState::LoseMember(const Member& member, const std::string& why, TimePoint now) {
  if (!member.done) progress_.OnWorkerLost();
  spdlog::warn("{} {}", member.ToString(), why);
  // Nobody needs a worker that is done; if it was the lead, the next rank becomes the lead.
  const LossAction action = member.done ? LossAction::kContinue : mode().OnLoss();
  RemoveMember(member);
  if (phase_ != v1::PHASE_RUNNING) return;
  restored_steps_.erase(member.rank);
  if (action == LossAction::kFail) {
    SetPhase(v1::PHASE_FAILED,
             absl::StrCat(member.ToString(), " ", why, "; the job was at version ", shards_.lowest_applied_version()));
  } else if (action == LossAction::kWait) {
    replacements_.Await(member, now);
    spdlog::warn("rank {} is kept for another worker for {} (--replacement_timeout)", member.rank,
                 FormatSeconds(options_.replacement_timeout));
  } else if (action == LossAction::kContinue && members_.members().empty()) {
    if (lead_left_) return SetPhase(v1::PHASE_FINISHED, "");
    if (!options_.elastic()) {
      return SetPhase(v1::PHASE_FAILED, absl::StrCat("no worker is left; the last, ", member.ToString(), ", ", why));
    }
    finishing_ = false;  // Another one may come, and evaluate.
  }
}

// ---- The end, and views

bool JobState::Fail(const std::string& reason) {
  if (over()) return false;
  SetPhase(v1::PHASE_FAILED, reason);
  return true;
}

absl::Status JobState::ShutDown() {
  if (superseded()) return absl::UnavailableError(superseded_);
  if (phase_ != v1::PHASE_SHUT_DOWN) SetPhase(v1::PHASE_SHUT_DOWN, "");
  return absl::OkStatus();
}

void JobState::SetPhase(v1::Phase phase, const std::string& failure) {
  Check(!ended() || phase == v1::PHASE_SHUT_DOWN, "a job ends once");
  phase_ = phase;
  failure_ = failure;
  if (phase == v1::PHASE_RUNNING) {
    terms_.told_layouts().Clear();
    spdlog::info("the job is running: {} workers, {} shards", members_.members().size(), options_.num_shards);
  }
  if (phase == v1::PHASE_FINISHED) spdlog::info("the job is finished");
  if (phase == v1::PHASE_FAILED) spdlog::error("the job failed: {}", failure);
  if (phase == v1::PHASE_SHUT_DOWN) spdlog::info("{}", Message(JobShutDown()));
}

bool JobState::NothingIsLeft() const {
  return phase_ == v1::PHASE_RUNNING && !finishing_ && members_.all_done() &&
         (replacements_.empty() || runs_.AllUsed());
}

std::vector<StepSet> JobState::NextView(TimePoint now) {
  const bool initialised = shards_.AllInitialised();
  if (phase_ == v1::PHASE_GATHERING && !awaits_first_checkpoint_ && Complete(now)) {
    last_progress_ = now;
    // Whoever takes a rank of the restored job later begins where others are by then, unless a lost one is waited for.
    if (mode().OnLoss() != LossAction::kWait) {
      std::erase_if(restored_steps_, [this](const auto& step) { return members_.At(step.first) == nullptr; });
    }
    members_.SetFirstStep(StartStep());
    SetPhase(v1::PHASE_RUNNING, "");
    progress_.OnRunning(shards_.lowest_applied_version(), restored() == nullptr ? 0 : restored()->job.samples(), now);
  }
  if (NothingIsLeft()) {
    replacements_.Forget();
    finishing_ = true;
  }
  CountWorkers(now);
  if (!initialised && restored() == nullptr &&
      (!initialiser_.has_value() || !members_.members().contains(*initialiser_))) {
    initialiser_.reset();
    // Not whoever comes first: workers may bring weights of their own, and which of them count must not be by chance.
    const bool all_here = members_.members().size() >= options_.num_workers;
    if (members_.members().contains(0)) initialiser_ = 0;
    // Where there are more ranks than it takes to begin, the first may have nobody.
    if (!initialiser_.has_value() && all_here) initialiser_ = members_.Lead()->rank;
    initialiser_view_ = view_ + 1;
  }
  ++view_;
  has_newcomers_ = false;
  std::set<RunTaker> takers;
  for (const auto& [rank, member] : members_.members()) {
    takers.insert({.rank = rank, .incarnation = member.incarnation});
  }
  runs_.OnView(view_, takers);
  norms_.OnView(members_);
  return steps_.OnView(members_, now);
}

// ---- Workers that come and go.

void JobState::CountWorkers(TimePoint now) {
  if (!HasTooFew()) {
    const bool goes_on = too_few_since_.has_value() && phase_ == v1::PHASE_RUNNING && !finishing_ && !runs_.AllUsed();
    if (goes_on) spdlog::info("training goes on");
    return too_few_since_.reset();
  }
  if (!too_few_since_.has_value()) too_few_since_ = now;
  SayTooFew(now);
}

void JobState::SayTooFew(TimePoint now) {
  too_few_said_ = now;
  spdlog::warn("training waits for {}, for {} (--replacement_timeout)", MissingWorkers(),
               FormatSeconds(options_.replacement_timeout - (now - *too_few_since_)));
}

std::string JobState::MissingWorkers() const {
  const size_t here = members_.members().size();
  const size_t missing = needed_workers() - here;
  return absl::StrCat(missing, " more ", missing == 1 ? "worker" : "workers", " (", here, " of at least ",
                      needed_workers(), runs_.AllUsed() ? " " : " (--min_workers) ", here == 1 ? "is" : "are",
                      " there)");
}

std::optional<std::string> JobState::TooFewForTooLong(TimePoint now) const {
  if (!HasTooFew() || !too_few_since_.has_value() || now - *too_few_since_ <= options_.replacement_timeout) {
    return std::nullopt;
  }
  return absl::StrCat("training has waited for ", MissingWorkers(), " for ", FormatSeconds(now - *too_few_since_),
                      " (--replacement_timeout=", FormatSeconds(options_.replacement_timeout), ")");
}

// ---- Data that are the workers' own (--data=own).

absl::Status JobState::CheckOwnData(uint32_t rank, const v1::DataSummary& data) const {
  if (options_.hands_out_runs) {
    return absl::FailedPreconditionError(
        "--data=own: this job has --budget=job, which hands out runs of samples that all workers have");
  }
  PS_RETURN_IF_ERROR(own_data_.Check(rank, data));
  const uint64_t samples = own_data_.SamplesWith(rank, data);
  return samples == 0 ? absl::OkStatus() : terms_.CheckSchedule(samples);
}

void JobState::AddOwnData(uint32_t rank, const v1::DataSummary& data) {
  const bool was_fixed = own_data_.of_all().has_value();
  own_data_.Add(rank, data);
  if (was_fixed || !own_data_.of_all().has_value()) return;
  const DataSummary& all = *own_data_.of_all();
  terms_.SetSamplesPerEpoch(all.samples);
  layout_view_ = view_ + 1;
  spdlog::info("the workers' own data: {} training samples together, at most {} of one worker", all.samples,
               all.largest);
}

// ---- Hyperparameters: what they are now, and what an operator sets.

absl::StatusOr<JobState::Setting> JobState::CheckSet(const v1::SetHyperparametersRequest& request) const {
  Setting setting;
  Problems problems;
  const absl::Status not_running =
      absl::FailedPreconditionError("hyperparameters are set while the job runs; it is not running yet");
  const std::optional<OptimizerSetup>& setup = optimizer().setup();
  if (!setup.has_value()) return not_running;
  ScheduleOptions schedule;
  problems.Check(request.schedule().empty() || !optimizer().leaves_to_workers(), "schedule: --optimizer=", kLocal,
                 " leaves schedules to the workers");
  if (!request.schedule().empty()) {
    problems.Read(ParseSchedule({request.schedule().begin(), request.schedule().end()}), schedule);
  }
  if (request.values_size() > 0 || request.schedule().empty()) {
    problems.Read(CheckValues(request.values(), *setup), setting.values);
  }
  PS_RETURN_IF_ERROR(problems.ToStatus());
  PS_RETURN_IF_ERROR(Serving());
  if (phase_ != v1::PHASE_RUNNING) return not_running;
  if (request.schedule().empty()) return setting;
  PS_ASSIGN_OR_RETURN(setting.schedule, ResolveSchedule(schedule, terms_.samples_per_epoch()));
  return setting;
}

void JobState::OnSet(const Setting& setting) {
  for (const auto& [name, value] : setting.values) set_values_[name] = value;
  if (setting.schedule.has_value()) set_schedule_ = setting.schedule;
}

HyperparameterValues JobState::hyperparameters() const {
  const std::optional<OptimizerSetup>& setup = optimizer().setup();
  if (!setup.has_value()) return {};
  Hyperparameters values = Changed(setup->hyperparameters, set_values_);
  values.learning_rate = told_learning_rate_.value_or(values.learning_rate);
  return ValuesOf(values, *setup);
}

std::optional<Schedule> JobState::schedule() const {
  if (set_schedule_.has_value()) return set_schedule_;
  const absl::StatusOr<Schedule> schedule = ResolveSchedule(options_.schedule, terms_.samples_per_epoch());
  return schedule.ok() ? std::optional<Schedule>(*schedule) : std::nullopt;
}

// ---- What time does to a job: leases that end, servers that do not come back, no progress.

bool JobState::CheckTimes(TimePoint now, const std::function<bool(const Member&)>& is_joining) {
  if (ended()) return false;
  if (!began_.has_value()) began_ = now;
  members_.SuspectSilent(now);
  std::vector<Member> lost = members_.Lost(now, now < keep_suspects_until_ ? options_.lease : options_.reconnect_grace);
  std::erase_if(lost, is_joining);
  for (const Member& member : lost) {
    if (ended()) break;
    if (options_.elastic()) short_lives_.OnLost(member.host, member.joined, now);
    const bool silent = now - member.last_heard > options_.lease;
    LoseMember(member,
               silent ? absl::StrCat("was lost: last heard from ", FormatSeconds(now - member.last_heard),
                                     " ago (--lease=", FormatSeconds(options_.lease), ")")
                      : absl::StrCat("was lost: its connection broke ", FormatSeconds(now - *member.suspect_since),
                                     " ago (--reconnect_grace=", FormatSeconds(options_.reconnect_grace), ")"),
               now);
  }
  if (phase_ == v1::PHASE_RUNNING) CheckAbsent(now);
  // When all are done there are no more steps: the lead evaluates, for as long as it renews its lease. A server that is
  // gone, and a worker that is to be replaced, have times of their own.
  const bool may_progress =
      phase_ == v1::PHASE_RUNNING && !finishing_ && shards_.Missing().empty() && replacements_.empty() && !HasTooFew();
  if (may_progress && now - last_progress_ > options_.progress_timeout) {
    const std::string waiting_for = WaitingFor(now);
    SetPhase(v1::PHASE_FAILED, absl::StrCat("no progress for ", FormatSeconds(now - last_progress_),
                                            " (--progress_timeout)", waiting_for.empty() ? "" : ": ", waiting_for));
  }
  CheckRestoring(now);
  if (ended()) progress_.OnEnded(now);
  progress_.Look(members_, now);
  SayStuck(now);
  return !lost.empty() || ended() || NothingIsLeft() || has_newcomers_ ||
         (phase_ == v1::PHASE_GATHERING && !awaits_first_checkpoint_ && Complete(now));
}

void JobState::CheckAbsent(TimePoint now) {
  const bool comes_back = options_.checkpoints.has_value();
  const auto time = comes_back ? options_.checkpoints->server_timeout : options_.lease;
  if (const std::optional<std::string> lost = shards_.Lost(now, time); lost.has_value()) {
    return SetPhase(v1::PHASE_FAILED,
                    absl::StrCat(*lost, comes_back ? ", and did not come back (--server_timeout=" : " (--lease=",
                                 FormatSeconds(time), ")"));
  }
  if (!replacements_.empty() || HasTooFew()) last_progress_ = now;  // What is waited for is known.
  if (HasTooFew() && too_few_since_.has_value() && now - too_few_said_ >= kSayEvery) SayTooFew(now);
  if (const std::optional<std::string> overdue = replacements_.Overdue(now); overdue.has_value()) {
    SetPhase(v1::PHASE_FAILED, *overdue);
  }
}

void JobState::OnGap(std::chrono::nanoseconds gap, TimePoint now) {
  members_.Extend(gap, now);
  shards_.Extend(gap, now);
  replacements_.Extend(gap, now);
  const auto later = [&](TimePoint since) { return std::min(since + gap, now); };
  last_progress_ = later(last_progress_);
  progress_.Extend(gap, now);
  if (began_.has_value()) began_ = later(*began_);
  if (rejoining_since_.has_value()) rejoining_since_ = later(*rejoining_since_);
  if (too_few_since_.has_value()) too_few_since_ = later(*too_few_since_);
  // Their connections may have been given up meanwhile; opening them again takes longer than the grace.
  keep_suspects_until_ = now + options_.lease;
  spdlog::warn("this server was suspended for {}; all leases are extended by as much", FormatSeconds(gap));
}

std::string JobState::WaitingFor(TimePoint now) const {
  const std::string steps = WaitingForSteps(now);
  const std::string reduction = phase_ == v1::PHASE_RUNNING ? WaitingForReduction(now) : "";
  return absl::StrCat(steps, steps.empty() || reduction.empty() ? "" : "; ", reduction);
}

std::string JobState::WaitingForSteps(TimePoint now) const {
  const uint32_t num_workers = options_.num_workers;
  if (!shards_.Missing().empty()) return absl::StrCat("waiting for ", shards_.DescribeMissing(now));
  if (phase_ == v1::PHASE_GATHERING) {
    if (restored() != nullptr && !shards_.AllInitialised()) return absl::StrCat("restoring ", restored()->path);
    if (AwaitsFirstCheckpoint(now)) return "waiting for the first checkpoint";
    const size_t here = members_.members().size();
    if (here < num_workers) {
      const std::string which = restored() == nullptr || here == 0 || options_.elastic()
                                    ? ""
                                    : absl::StrCat(" (rank ", FirstOf(members_.FreeRanks()), ")");
      return absl::StrCat("waiting for ", num_workers - here, " of ", num_workers, " workers to join", which);
    }
    return absl::StrCat("waiting for the initial weights from ", members_.Describe({initialiser_.value_or(0)}, now));
  }
  if (phase_ != v1::PHASE_RUNNING) return "";
  if (HasTooFew()) return absl::StrCat("training waits for ", MissingWorkers());
  const std::string replacements = replacements_.Describe(now);
  if (!replacements.empty() && mode().policy().exact_versions()) {  // A step needs everybody.
    return absl::StrCat("step ", shards_.lowest_applied_version(), ": waiting for ", replacements);
  }
  std::string blocked = shards_.waiting_for();
  if (blocked.empty()) blocked = norms_.WaitingFor();
  if (!blocked.empty()) return replacements.empty() ? blocked : absl::StrCat(blocked, "; waiting for ", replacements);
  const std::set<uint32_t>& ranks = members_.LowestStep();
  if (!replacements.empty()) return absl::StrCat(ranks.empty() ? "" : "going on, and ", "waiting for ", replacements);
  if (ranks.empty() && !lead_left_ && members_.Lead() != nullptr) {
    return absl::StrCat("all workers are done: waiting for ", members_.Lead()->ToString(), " to evaluate and leave");
  }
  if (ranks.empty()) return "waiting for all workers to leave";
  const bool some_ahead = ranks.size() < members_.members().size();
  if (!some_ahead) return steps_.Incomplete();
  const uint64_t step = members_.members().at(*ranks.begin()).step;
  const std::string who = members_.Describe(ranks, now);
  // Elsewhere only who is ahead by more than the mode's bound waits, if there is one.
  return mode().synchronous() ? absl::StrCat("step ", step, ": waiting for ", who)
                              : absl::StrCat("the slowest, at step ", step, ": ", who);
}

}  // namespace ps
