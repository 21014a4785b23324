#include "server/shard/shard_core.h"

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/proto_values.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kTellStatus(1);
constexpr std::chrono::seconds kSayHeld(10);  // A line says how long a cut has held pushes back after each of these.

}  // namespace

ShardCore::ShardCore(const ShardOptions& options, ThreadPool& pool, PoolCalls pool_calls, bool has_store,
                     bool has_metrics)
    : options_(options),
      pool_calls_(std::move(pool_calls)),
      has_store_(has_store),
      has_metrics_(has_metrics),
      state_(options, pool, pool_calls_.built),
      streams_(options.stream) {}

ShardReady ShardCore::Take(Updater::Part part) {
  if (!state_.discarded.empty()) actions_.emplace_back(LetGo{std::exchange(state_.discarded, {})});
  return {.actions = std::exchange(actions_, {}), .part = std::move(part)};
}

// ---- From the chief

bool ShardCore::NeedsMemory(const v1::View& view) const {
  return view.layout().tensors_size() > 0 && state_.layout == nullptr && view.number() > state_.job.view().number() &&
         !state_.job.shut_down();
}

ShardReady ShardCore::OnChiefUpdate(const v1::ChiefUpdate& update, absl::StatusOr<ShardMemory>& memory) {
  if (state_.job.shut_down()) return Take();
  if (state_.job.HasGap(update.view())) {
    Fail(absl::StrCat("shard ", options_.shard, " has view ", state_.job.view().number(), ", and the chief's view ",
                      update.view().number(), " says what has changed since view ", update.view().since()));
  } else if (update.has_view() && state_.job.Accept(update.view())) {
    SetView(update.view(), memory);
  }
  for (const v1::StepDecision& decision : update.decisions()) {
    Decide({.step = decision.step(),
            .ranks = {decision.ranks().begin(), decision.ranks().end()},
            .steps = {decision.steps().begin(), decision.steps().end()}},
           decision.dropped_samples());
  }
  for (const v1::NormTotals& totals : update.norms()) OnNorms(totals);
  if (update.has_cut()) OnCut(update.cut());
  if (update.keep_checkpoints_from() > 0 && has_store_ && options_.shard > 0) {
    actions_.emplace_back(
        KeepCheckpoints{.from = update.keep_checkpoints_from(), .newest = update.newest_checkpoint()});
  }
  Advance();
  AnswerWaits();
  return Take();
}

void ShardCore::SetView(const v1::View& view, absl::StatusOr<ShardMemory>& memory) {
  if (state_.IsReset()) state_.LetGo(std::shared_ptr<Parameters>(state_.DropLayout()));
  if (state_.layout == nullptr && view.layout().tensors_size() > 0) {
    SetLayout(memory);
    if (view.has_restore() && state_.parameters != nullptr) BeginRestore();
  }
  for (const StepSet& set : state_.SetMembers()) Decide(set, state_.pushes.dropped_samples());
  state_.waiters.WakeAll();
  if (state_.job.running()) {
    if (!told_status_at_.has_value()) told_status_at_ = options_.clock();
    state_.record.OnRunning(*told_status_at_);
  } else {
    Release(state_.cut.End());
  }
  Report(state_.untold.Take());  // Whom a step needs may be others now.
  if (state_.job.running() || !told_status_at_.has_value()) return;
  TellStatus(options_.clock());  // The last one.
  told_status_at_.reset();
}

void ShardCore::SetLayout(absl::StatusOr<ShardMemory>& memory) {
  const absl::Status set = memory.ok() ? state_.SetLayout(*std::move(memory)) : memory.status();
  if (!set.ok()) return Fail(Message(set));
  if (options_.optimizer != kFromWorker) return;
  nlohmann::ordered_json settings = SettingsOf(state_.setup);
  const std::string groups = state_.setup.groups.empty() ? "" : "; " + ToString(state_.setup.groups);
  spdlog::info("the workers bring --optimizer={}, {}{}", state_.setup.optimizer,
               ToString(ValuesOf(state_.setup.hyperparameters, state_.setup.optimizer)), groups);
  Metric("optimizer", {{"settings", std::move(settings)}});
}

void ShardCore::OnCut(const v1::Cut& cut) {
  if (!state_.job.running() && !cut.at_once()) return;  // The chief has given it up.
  const bool over = state_.IsOver(cut);
  const std::vector<ShardCut::Push> released = state_.OnCut(cut, options_.clock());
  if (cut.phase() == v1::Cut::FREEZE) Report(state_.ReportCut(cut, state_.parameters->version()));
  const bool busy = state_.writes_checkpoint && !cut.at_once();  // When the job stands still there is time.
  if (cut.phase() == v1::Cut::COMMIT && cut.checkpoint() > 0 && (over || busy)) {
    FailCheckpoint(cut,
                   over ? "the chief was not heard from for too long" : "the disk has not taken the one before yet");
  } else if (cut.phase() == v1::Cut::COMMIT && cut.checkpoint() > 0) {
    state_.SetCheckpointDue(cut);
    Report(state_.ReportCut(cut, state_.parameters->version()));
    TakeCheckpoint();  // Before any push that was held back is decided on.
  } else if (cut.phase() == v1::Cut::COMMIT && over) {
    Fail(absl::StrCat("cut ", cut.number(), " came when this shard had given it up: hyperparameters would differ"));
  } else if (cut.phase() == v1::Cut::COMMIT) {
    const uint64_t version = state_.CommitVersion(cut);
    std::optional<Schedule> schedule;
    if (cut.has_schedule()) {
      const absl::StatusOr<Schedule> given = FromProto(cut.schedule());
      if (!given.ok()) return Fail(Message(given.status()));
      schedule = *given;
    }
    state_.updater.Change({.version = version, .values = FromProto(cut.hyperparameters()), .schedule = schedule});
    Report(state_.ReportCut(cut, version));
  }
  Release(released);
}

ShardReady ShardCore::SetChiefLost(bool lost) {
  // A cut that is under way may go on when the chief is back. Otherwise Tick ends it, unless this shard has told that
  // it is there: then it waits for the chief, or for the end of the job.
  state_.job.SetChiefLost(lost);
  Advance();
  AnswerWaits();
  return Take();
}

// ---- Initial values

std::pair<absl::Status, ShardReady> ShardCore::AddInitialSlices(const v1::Identity& id,
                                                                const std::vector<ReceivedSlice>& slices,
                                                                const Parameters::InitialStates& states) {
  const absl::Status added = state_.AddInitial(id, slices, states);
  if (added.ok() && state_.parameters->initialised()) Report({});
  return {added, Take()};
}

// ---- Pushes

std::pair<absl::Status, ShardReady> ShardCore::AddSlices(const void* session, const v1::PushRequest& header,
                                                         std::vector<ReceivedSlice> slices,
                                                         std::optional<size_t> not_finite) {
  const absl::Status serving = state_.job.Serving();
  if (!serving.ok() || !state_.job.IsMember(header.id())) return {serving, ShardReady()};
  const TimePoint now = options_.clock();
  state_.stall.Heard(header.id().rank(), now);
  const absl::StatusOr<PushTable::Arrival> arrival = state_.Arrive(session, header, std::move(slices), not_finite);
  if (arrival.ok() && arrival->push != nullptr && arrival->push->began == TimePoint()) {
    arrival->push->began = now;
  }
  Updater::Part part;
  if (arrival.ok() && arrival->push != nullptr) {
    part = state_.Speculate(*arrival);
    if (arrival->push->has_all()) CompletePush(header.id().rank(), now);
  }
  Updater::Part next = Advance(/*caller_builds=*/part.update == nullptr);
  if (part.update == nullptr) part = std::move(next);
  return {arrival.status(), Take(std::move(part))};
}

void ShardCore::CompletePush(uint32_t rank, TimePoint now) {
  Push& push = state_.pushes.Complete(rank);
  state_.record.OnComplete(push, now);
  if (state_.follows_decisions) {
    state_.untold.Add(push, now);
    if (!state_.NeedsOthers(push)) Report(state_.untold.Take());
    return;
  }
  if (!state_.MeasuresFirst(push)) return Admit(push);
  state_.updater.MeasurePush(state_.pushes.Find(rank), pool_calls_.measured);
}

void ShardCore::Admit(const Push& push) {
  if (state_.cut.Hold({.rank = push.rank, .incarnation = push.incarnation, .step = push.step})) return;
  DecideComplete(push);
}

void ShardCore::DecideComplete(const Push& push) {
  const PushHeader header = {.rank = push.rank, .step = push.step, .version = push.version, .samples = push.samples};
  for (const StepSet& set : state_.mode->Complete(header)) Decide(set, state_.pushes.dropped_samples());
}

void ShardCore::RefuseStale() {
  if (state_.pushes.RefuseStale(*state_.mode)) AnswerWaits();
}

void ShardCore::Release(const std::vector<ShardCut::Push>& pushes) {
  for (const ShardCut::Push& held : pushes) {
    // Its owner may have been lost, or by what was decided before it has become stale.
    const std::shared_ptr<Push> push = state_.pushes.FindComplete(held.rank, held.incarnation, held.step);
    if (push != nullptr) DecideComplete(*push);
  }
}

void ShardCore::Decide(const StepSet& set, uint64_t dropped_samples) {
  if (state_.mode->WasDecided(set)) return;
  absl::StatusOr<Pushes> pushes = state_.pushes.Take(set);
  if (!pushes.ok()) return Fail(Message(pushes.status()));
  state_.record.OnDecided(*pushes, state_.NeededOf(pushes->size()));
  state_.mode->Decided(set);
  if (set.makes_version) {
    state_.updater.SetDropped(dropped_samples);
    state_.updater.Commit(*std::move(pushes), options_.clock());
  } else {
    Record(*pushes);
    AnswerWaits();
  }
  RefuseStale();
}

void ShardCore::Record(const Pushes& pushes) {
  for (const auto& push : pushes) {
    state_.pushes.Record(*push, v1::ANSWER_APPLIED);
    state_.mode->Applied(push->rank, push->step);
  }
}

// ---- Versions

ShardReady ShardCore::OnBuilt(const std::vector<size_t>& slices, bool caller_builds) {
  state_.updater.OnBuilt(slices);
  return Take(Advance(caller_builds));
}

void ShardCore::OnReleased() {
  if (!state_.job.failed_here()) state_.updater.StartNext(options_.clock());
}

Updater::Part ShardCore::Advance(bool caller_builds) {
  state_.AbandonDropped();
  if (!state_.job.running()) state_.updater.GiveUpRound();
  while (std::optional<Updater::Ended> ended = state_.updater.TakeEnded()) {
    OnEnded(*ended);
    state_.LetGo(std::move(ended->update));  // Its gradients are freed last.
  }
  TakeCheckpoint();
  if (const std::optional<std::string> reason = state_.NeedsDone(); reason.has_value()) Fail(*reason);
  Updater::Part part;
  if (!state_.job.failed_here()) part = state_.updater.StartNext(options_.clock(), caller_builds);
  ReportNorms();
  if (state_.ReachedCut()) {
    v1::Cut reached;
    reached.set_number(state_.cut.number());
    reached.set_phase(v1::Cut::ADVANCE);
    Report(state_.ReportCut(reached, state_.parameters->version()));
  }
  if (state_.parameters == nullptr) return part;
  const auto pin = [this](uint32_t rank) {
    return state_.parameters->PinNext({.rank = rank, .peer = ""}, options_.clock());
  };
  for (ToldSlices& told : streams_.Tell(state_.updater.readable_early(), state_.parameters->build(), pin)) {
    actions_.emplace_back(std::move(told));
  }
  return part;
}

void ShardCore::OnEnded(const Updater::Ended& ended) {
  const Updater::Update& update = *ended.update;
  if (ended.outcome == Updater::Ended::Outcome::kAbandoned) return;
  for (const auto& push : ended.refused) state_.RefuseNotFinite(*push, update.NotFinite(*push));
  if (ended.outcome == Updater::Ended::Outcome::kRefused) return AnswerWaits();
  const bool given_up = ended.outcome == Updater::Ended::Outcome::kGivenUp;
  if (given_up || ended.outcome == Updater::Ended::Outcome::kNotFinite) {
    if (!given_up) Fail(update.NotFinite(), /*not_finite=*/true);
    for (const Updater::Version& version : update.versions) {
      for (const auto& push : version.pushes) state_.pushes.Release(*push);
    }
  } else {
    const TimePoint now = options_.clock();
    for (const Updater::Version& version : update.versions) {
      Record(version.pushes);
      state_.record.OnVersion(version, now);
      for (const HyperparameterTimeline::Change& change : state_.updater.TakeEffective(version)) OnChanged(change);
      if (options_.traced_steps.has_value() && IsTraced(*options_.traced_steps, version)) {
        actions_.emplace_back(TraceOf(options_.shard, state_.job.view().generation(), version, now));
      }
      if (has_metrics_) Metric("apply", Updater::Update::Fields(version, now));
    }
    const std::optional<float> told = state_.updater.told_learning_rate();
    const bool news = std::exchange(told_learning_rate_, told) != told && options_.shard == 0;  // Status shows it.
    // By the first shard's version the chief knows when a checkpoint is due.
    if (state_.follows_decisions || news || (options_.takes_checkpoints && options_.shard == 0)) Report({});
  }
  AnswerWaits();
}

void ShardCore::OnChanged(const HyperparameterTimeline::Change& change) {
  spdlog::info("{} from version {} on", ToString(change.values, change.schedule), change.version);
  nlohmann::ordered_json fields = {{"version", change.version}, {"values", ToJson(change.values)}};
  if (change.schedule.has_value()) fields["schedule"] = ToString(*change.schedule);
  Metric("set", std::move(fields));
}

// ---- What all shards measure before any of them applies it

void ShardCore::OnNorms(const v1::NormTotals& totals) {
  if (!state_.job.running()) return;
  const v1::NormRound& round = totals.round();
  if (round.version() > 0) return state_.updater.OnTotals(totals);
  const std::shared_ptr<Push> push = state_.pushes.FindComplete(round.rank(), round.incarnation(), round.step());
  if (push == nullptr || !state_.MeasuresFirst(*push)) return;  // It was refused here, or its totals came before.
  if (totals.refused()) {
    if (state_.pushes.RefuseComplete(round.rank(), round.incarnation(), round.step())) AnswerWaits();
    return;
  }
  push->clip_factors = state_.updater.ClipFactorsOf(totals);
  Admit(*push);
}

ShardReady ShardCore::OnPushMeasured(v1::NormSums sums) {
  const v1::NormRound& round = sums.round();
  // Not if it was dropped or refused meanwhile.
  if (state_.pushes.FindComplete(round.rank(), round.incarnation(), round.step()) == nullptr) return Take();
  v1::ShardReport report;
  *report.add_norms() = std::move(sums);
  Report(std::move(report));
  return Take();
}

void ShardCore::ReportNorms() {
  v1::ShardReport report;
  for (v1::NormSums& sums : state_.updater.TakeSums()) *report.add_norms() = std::move(sums);
  const std::vector<PushTable::Refusal> refusals = state_.pushes.TakeRefusals();
  if (state_.updater.measures_pushes()) {
    for (const PushTable::Refusal& refusal : refusals) {
      v1::NormSums* const sums = report.add_norms();
      sums->set_refused(true);
      sums->mutable_round()->set_rank(refusal.rank);
      sums->mutable_round()->set_incarnation(refusal.incarnation);
      sums->mutable_round()->set_step(refusal.step);
    }
  }
  if (report.norms_size() > 0) Report(std::move(report));
}

// ---- Streams and waits

ShardReady ShardCore::OpenStream(const void* session, const v1::PushRequest& header, bool this_host,
                                 std::shared_ptr<ShardClient> client) {
  if (state_.mode->policy().exact_versions() && state_.job.IsMember(header.id())) {
    streams_.Open(session, header.id().rank(), header.step(), CarriesOf(header), this_host, std::move(client));
  }
  return Take();
}

ShardReady ShardCore::CloseStream(const void* session) {
  state_.LetGo(streams_.Close(session));
  return Take();
}

ShardReady ShardCore::Await(const void* session, const ShardRequest& request, bool push_ended,
                            std::shared_ptr<ShardClient> client) {
  const TimePoint now = options_.clock();
  Wait wait = {.session = session,
               .request = request,
               .answer = {},
               .client = std::move(client),
               .parked_at = now,
               .deadline = now + request.wait};
  const bool refused = Deliver(wait, state_.RefuseOnArrival(wait, push_ended));
  Advance();  // A push that ended too early was dropped.
  if (refused) return Take();
  if (request.caller.member()) state_.stall.Heard(request.caller.id.rank(), now);
  if (!request.push.has_value()) state_.OnRead(request);
  if (Deliver(wait, state_.AnswerNow(wait, now))) return Take();
  const absl::Status room = state_.waiters.CheckRoom(wait);
  if (room.ok()) {
    state_.waiters.Park(std::move(wait));
    state_.NoteClockWait(now);
  } else {
    Deliver(wait, Annotate(room, absl::StrCat("shard ", options_.shard)));
  }
  return Take();
}

ShardReady ShardCore::Gone(const void* session) {
  for (Wait& wait : state_.waiters.Take(session)) Deliver(wait, absl::CancelledError("the caller disconnected"));
  state_.NoteClockWait(options_.clock());
  return Take();
}

void ShardCore::AnswerWaits() {
  const TimePoint now = options_.clock();
  for (const uint32_t rank : state_.pushes.TakeAnswered()) state_.waiters.Wake(rank);
  if (!state_.job.Serving().ok()) state_.waiters.WakeAll();
  state_.waiters.AnswerAwake(state_.mode->step(),
                             [&](Wait& wait) { return Deliver(wait, state_.AnswerNow(wait, now)); });
  state_.NoteClockWait(now);
}

bool ShardCore::Deliver(Wait& wait, ShardState::Answer answer) {
  if (!answer.has_value()) return false;
  state_.LetGo(streams_.Close(wait.session));
  if (answer->ok()) {
    const TimePoint now = options_.clock();
    (*answer)->waited = now - wait.parked_at;
    if ((*answer)->push.has_value()) state_.record.OnPushAnswered(wait.push_answered.value_or(now) - wait.parked_at);
    if ((*answer)->weights.has_value()) state_.record.OnPullAnswered(now - wait.push_answered.value_or(wait.parked_at));
  }
  actions_.emplace_back(AnswerClient{.client = std::move(wait.client), .answer = *std::move(answer)});
  return true;
}

// ---- The shard as a whole

void ShardCore::Fail(const std::string& reason, bool not_finite) {
  if (!state_.job.Fail(reason)) return;
  spdlog::error("{}", reason);
  v1::ShardReport report;
  report.set_failure(reason);
  report.set_not_finite(not_finite);
  Report(std::move(report));
}

void ShardCore::Report(v1::ShardReport report) {
  state_.Fill(&report);
  told_version_ = report.applied_version();
  actions_.emplace_back(TellChief{std::move(report)});
}

void ShardCore::Metric(const std::string& event, nlohmann::ordered_json fields) {
  if (has_metrics_) actions_.emplace_back(WriteMetric{.event = event, .fields = std::move(fields)});
}

void ShardCore::TellStatus(TimePoint now) {
  told_status_at_ = now;
  v1::ShardReport report;
  *report.mutable_status() = state_.Status(now);
  actions_.emplace_back(TellChief{std::move(report)});
}

ShardReady ShardCore::ReportFailure(const std::string& reason) {
  Fail(reason);
  return Take();
}

ShardReady ShardCore::Tick(TimePoint now) {
  if (state_.cut.Expired(now)) {
    spdlog::warn("cut {}: nothing was heard of it from the chief; going on", state_.cut.number());
    Release(state_.cut.End());
    Advance();
  }
  SayHeld(now);
  // That the job makes progress is told here, where no version is told of by itself.
  const bool progress = state_.readable() && state_.parameters->version() != told_version_;
  if (state_.stall.Update(state_.Situation(now), now) || state_.untold.due(now) || progress) {
    Report(state_.untold.Take());
  }
  AnswerWaits();  // A member's pull may have waited for its older pins; their release notifies nobody.
  state_.NoteWaits(now);
  const bool tells = told_status_at_.has_value() && !state_.job.shut_down();
  if (tells && now - *told_status_at_ >= kTellStatus) TellStatus(now);
  std::vector<Wait> expired = state_.waiters.TakeExpired(now);
  const std::string waiting_for = expired.empty() ? "" : state_.WaitingFor(now);
  for (Wait& wait : expired) Deliver(wait, state_.TimedOut(wait, waiting_for, now));
  return Take();
}

void ShardCore::SayHeld(TimePoint now) {
  if (state_.cut.HeldFor(now) < kSayHeld || now < say_held_at_) return;
  say_held_at_ = now + kSayHeld;
  spdlog::warn("{}", state_.WaitingForCut(now));
}

ShardReady ShardCore::Shutdown(const absl::Status& status) {
  state_.job.Shutdown(status);
  AnswerWaits();
  return Take();
}

}  // namespace ps
