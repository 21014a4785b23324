#include "server/shard/shard.h"

#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/proto_values.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kSayHeld(10);  // A line says how long a cut has held pushes back after each of these.

// Copies what is read of slices that have positions: it is the shard's from now on.
absl::Status UnpackSlices(const v1::PushRequest& header, std::vector<ReceivedSlice>& slices) {
  for (ReceivedSlice& slice : slices) {
    if (!slice.payload.has_positions()) continue;
    PS_RETURN_IF_ERROR(Annotate(slice.payload.Unpack(), absl::StrCat("rank ", header.id().rank(), ", step ",
                                                                     header.step(), ": slice ", slice.index)));
  }
  return absl::OkStatus();
}

}  // namespace

Shard::Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics, CheckpointStore* store)
    : options_(options),
      report_(std::move(report)),
      metrics_(metrics),
      store_(store),
      state_(options, pool_, [this](const std::vector<size_t>& slices) { OnBuilt(slices); }),
      streams_(options.stream, outbox_),
      applies_in_place_(state_.applies_in_place()),
      pool_(options.apply_threads) {}

Shard::~Shard() {
  Shutdown(absl::CancelledError("the server is shutting down"));
  StopApplying();
}

// ---- From the chief

void Shard::OnChiefUpdate(const v1::ChiefUpdate& update) {
  absl::StatusOr<ShardMemory> memory = MakeMemory(update.view());  // Freed without the lock, too, if it is not used.
  const OutboxLock lock(outbox_, mutex_);
  if (state_.job.shut_down()) return;
  if (update.has_view() && state_.job.Accept(update.view())) SetView(update.view(), std::move(memory));
  for (const v1::StepDecision& decision : update.decisions()) {
    Decide({.step = decision.step(), .ranks = {decision.ranks().begin(), decision.ranks().end()}},
           decision.dropped_samples());
  }
  for (const v1::NormTotals& totals : update.norms()) OnNorms(totals);
  if (update.has_cut()) OnCut(update.cut());
  if (update.keep_checkpoints_from() > 0 && store_ != nullptr && options_.shard > 0) {
    outbox_.Add([this, from = update.keep_checkpoints_from(), newest = update.newest_checkpoint()] {
      store_->Keep(from, newest);
    });
  }
  Advance();
  AnswerWaits();
}

absl::StatusOr<ShardMemory> Shard::MakeMemory(const v1::View& view) {
  bool is_first = view.layout().tensors_size() > 0;
  if (is_first) {
    MutexLock lock(mutex_);
    is_first = state_.layout == nullptr && view.number() > state_.job.view().number() && !state_.job.shut_down();
  }
  if (!is_first) return absl::FailedPreconditionError("the model's memory is there, or there is no model yet");
  return MakeShardMemory(options_, view, [this] {
    MutexLock lock(mutex_);  // Makes no callbacks: this may run wherever a pin is released, even inside a gRPC call.
    if (!state_.job.failed_here()) state_.updater.StartNext(options_.clock());
  });
}

void Shard::SetView(const v1::View& view, absl::StatusOr<ShardMemory> memory) {
  if (state_.IsReset()) outbox_.Add([old = std::shared_ptr<Parameters>(state_.DropLayout())] {});
  if (state_.layout == nullptr && view.layout().tensors_size() > 0) {
    SetLayout(std::move(memory));
    if (view.has_restore() && state_.parameters != nullptr) BeginRestore();
  }
  for (const StepSet& set : state_.SetMembers()) Decide(set, state_.pushes.dropped_samples());
  state_.ForgetHeldOrphans();
  if (!state_.job.running()) Release(state_.cut.End());
  Report(state_.untold.Take());  // Whom a step needs may be others now.
}

void Shard::SetLayout(absl::StatusOr<ShardMemory> memory) {
  const absl::Status set = memory.ok() ? state_.SetLayout(*std::move(memory)) : memory.status();
  applies_in_place_ = state_.applies_in_place();
  if (!set.ok()) return Fail(Message(set));
  if (options_.optimizer != kFromWorker) return;
  nlohmann::ordered_json settings = SettingsOf(state_.setup);
  spdlog::info("the workers bring --optimizer={}, {}", state_.setup.optimizer,
               ToString(ValuesOf(state_.setup.hyperparameters, state_.setup.optimizer)));
  metrics_->Write("optimizer", {{"settings", std::move(settings)}});
}

void Shard::OnCut(const v1::Cut& cut) {
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

void Shard::SetChiefLost(bool lost) {
  const OutboxLock lock(outbox_, mutex_);
  // A cut that is under way may go on when the chief is back. Otherwise Tick ends it, unless this shard has told that
  // it is there: then it waits for the chief, or for the end of the job.
  state_.job.SetChiefLost(lost);
  Advance();
  AnswerWaits();
}

// ---- Initial values

absl::Status Shard::AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices) {
  if (const std::optional<size_t> found = FindNotFinite(slices, isa_); found.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", id.rank(), ": the initial values of slice ", slices[*found].index, " are not finite"));
  }
  const OutboxLock lock(outbox_, mutex_);
  const absl::Status added = state_.AddInitial(id, slices);
  if (added.ok() && state_.parameters->initialised()) Report({});
  return added;
}

absl::Status Shard::CheckInitialised() const {
  MutexLock lock(mutex_);
  return state_.CheckInitialised();
}

// ---- Pushes

bool Shard::NeedsSlicesOf(const v1::PushRequest& header) const {
  MutexLock lock(mutex_);
  const uint32_t rank = header.id().rank();
  return state_.job.running() && state_.job.IsMember(header.id()) &&
         !state_.pushes.ledger().Seen(rank, header.step()) && !state_.pushes.IsComplete(rank, header.step());
}

absl::Status Shard::AddSlices(const void* session, const v1::PushRequest& header, std::vector<ReceivedSlice> slices) {
  PS_RETURN_IF_ERROR(UnpackSlices(header, slices));
  const auto is_changeable = [](const ReceivedSlice& slice) { return slice.payload.changeable(); };
  if (!applies_in_place_ && std::any_of(slices.begin(), slices.end(), is_changeable)) {
    if (!NeedsSlicesOf(header)) slices.clear();
    for (ReceivedSlice& slice : slices) {
      if (is_changeable(slice)) slice.payload = slice.payload.Copied();
    }
  }
  const std::optional<size_t> not_finite = FindNotFinite(slices, isa_);  // The costly check, without the lock.
  Updater::SpeculativeUpdate ready;
  {
    const OutboxLock lock(outbox_, mutex_);
    PS_RETURN_IF_ERROR(state_.job.Serving());
    if (!state_.job.IsMember(header.id())) return absl::OkStatus();
    state_.stall.Heard(header.id().rank(), options_.clock());
    const absl::StatusOr<PushTable::Arrival> arrival = state_.Arrive(session, header, std::move(slices), not_finite);
    if (arrival.ok() && arrival->push != nullptr) {
      ready = state_.Speculate(*arrival);
      if (arrival->push->has_all()) CompletePush(header.id().rank());
    }
    Advance();
    PS_RETURN_IF_ERROR(arrival.status());
  }
  if (ready.update == nullptr) return absl::OkStatus();
  ready.update->Build(ready.slices);
  OnBuilt(ready.slices);
  return absl::OkStatus();
}

void Shard::CompletePush(uint32_t rank) {
  const Push& push = state_.pushes.Complete(rank);
  if (state_.follows_decisions) {
    state_.untold.Add(push, options_.clock());
    if (!state_.NeedsOthers(push)) Report(state_.untold.Take());
    return;
  }
  if (!state_.MeasuresFirst(push)) return Admit(push);
  state_.updater.MeasurePush(state_.pushes.Find(rank), [this](v1::NormSums sums) { OnPushMeasured(std::move(sums)); });
}

void Shard::Admit(const Push& push) {
  if (state_.cut.Hold({.rank = push.rank, .incarnation = push.incarnation, .step = push.step})) return;
  DecideComplete(push);
}

void Shard::DecideComplete(const Push& push) {
  const PushHeader header = {.rank = push.rank, .step = push.step, .version = push.version, .samples = push.samples};
  for (const StepSet& set : state_.mode->Complete(header)) Decide(set, state_.pushes.dropped_samples());
}

void Shard::RefuseStale() {
  if (state_.pushes.RefuseStale(*state_.mode)) AnswerWaits();
}

void Shard::Release(const std::vector<ShardCut::Push>& pushes) {
  for (const ShardCut::Push& held : pushes) {
    // By what was decided before, it may have become stale.
    if (!state_.pushes.IsComplete(held.rank, held.step)) continue;
    DecideComplete(*state_.pushes.Find(held.rank));
  }
}

void Shard::Decide(const StepSet& set, uint64_t dropped_samples) {
  if (state_.mode->WasDecided(set)) return;
  absl::StatusOr<Pushes> pushes = state_.pushes.Take(set);
  if (!pushes.ok()) return Fail(Message(pushes.status()));
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

void Shard::Record(const Pushes& pushes) {
  for (const auto& push : pushes) {
    state_.pushes.Record(*push, v1::ANSWER_APPLIED);
    state_.mode->Applied(push->rank, push->step);
  }
}

void Shard::OnBuilt(const std::vector<size_t>& slices) {
  const OutboxLock lock(outbox_, mutex_);
  state_.updater.OnBuilt(slices);
  Advance();
}

void Shard::Advance() {
  state_.AbandonDropped();
  if (!state_.job.running()) state_.updater.GiveUpRound();
  while (std::optional<Updater::Ended> ended = state_.updater.TakeEnded()) {
    OnEnded(*ended);
    outbox_.Add([update = std::move(ended->update)] {});  // Its gradients are freed last, and without the lock.
  }
  TakeCheckpoint();
  if (const std::optional<std::string> reason = state_.NeedsDone(); reason.has_value()) Fail(*reason);
  if (!state_.job.failed_here()) state_.updater.StartNext(options_.clock());
  ReportNorms();
  if (state_.ReachedCut()) {
    v1::Cut reached;
    reached.set_number(state_.cut.number());
    reached.set_phase(v1::Cut::ADVANCE);
    Report(state_.ReportCut(reached, state_.parameters->version()));
  }
  TellBuilt();
  Discard();
}

void Shard::Discard() {
  if (!state_.discarded.empty()) outbox_.Add([discarded = std::exchange(state_.discarded, {})] {});
}

void Shard::OnEnded(const Updater::Ended& ended) {
  const Updater::Update& update = *ended.update;
  if (ended.outcome == Updater::Ended::Outcome::kAbandoned) return;
  const bool given_up = ended.outcome == Updater::Ended::Outcome::kGivenUp;
  if (given_up || ended.outcome == Updater::Ended::Outcome::kNotFinite) {
    if (!given_up) Fail(update.NotFinite(), /*not_finite=*/true);
    for (const Updater::Version& version : update.versions) state_.pushes.Release(version.pushes);
  } else {
    for (const Updater::Version& version : update.versions) {
      Record(version.pushes);
      for (const HyperparameterTimeline::Change& change : state_.updater.TakeEffective(version)) OnChanged(change);
      if (metrics_->enabled()) metrics_->Write("apply", Updater::Update::Fields(version, options_.clock()));
    }
    const std::optional<float> told = state_.updater.told_learning_rate();
    const bool news = std::exchange(told_learning_rate_, told) != told && options_.shard == 0;  // For status.
    // By the first shard's version the chief knows when a checkpoint is due.
    if (state_.follows_decisions || news || (options_.takes_checkpoints && options_.shard == 0)) Report({});
  }
  AnswerWaits();
}

void Shard::OnChanged(const HyperparameterTimeline::Change& change) {
  spdlog::info("{} from version {} on", ToString(change.values, change.schedule), change.version);
  nlohmann::ordered_json fields = {{"version", change.version}, {"values", ToJson(change.values)}};
  if (change.schedule.has_value()) fields["schedule"] = ToString(*change.schedule);
  metrics_->Write("set", fields);
}

// ---- Streams

void Shard::OpenStream(const void* session, const v1::PushRequest& header, bool this_host,
                       BuildStreams::Callback callback) {
  const OutboxLock lock(outbox_, mutex_);
  if (!state_.mode->policy().exact_versions() || !state_.job.IsMember(header.id())) return;
  streams_.Open(session, header.id().rank(), header.step(), this_host, std::move(callback));
}

void Shard::CloseStream(const void* session) {
  const OutboxLock lock(outbox_, mutex_);
  streams_.Close(session);
}

void Shard::TellBuilt() {
  if (state_.parameters == nullptr) return;
  streams_.Tell(state_.updater.readable_early(), state_.parameters->build(), [&](uint32_t rank) {
    mutex_.AssertHeld();
    return state_.parameters->PinNext({.rank = rank, .peer = ""}, options_.clock());
  });
}

// ---- Waits

void Shard::Await(const void* session, const ShardRequest& request, bool push_ended, AnswerCallback callback) {
  const OutboxLock lock(outbox_, mutex_);
  const TimePoint now = options_.clock();
  Wait wait = {.session = session,
               .request = request,
               .answer = {},
               .callback = std::move(callback),
               .parked_at = now,
               .deadline = now + request.wait};
  const bool refused = Deliver(wait, state_.RefuseOnArrival(wait, push_ended));
  Advance();  // A push that ended too early was dropped.
  if (refused) return;
  if (request.caller.member()) state_.stall.Heard(request.caller.id.rank(), now);
  if (!request.push.has_value()) state_.OnRead(request);
  const bool answered = Deliver(wait, state_.AnswerNow(wait, now));
  Discard();
  if (answered) return;
  const absl::Status room = state_.waiters.CheckRoom(wait);
  if (room.ok()) return state_.waiters.Park(std::move(wait));
  Deliver(wait, Annotate(room, absl::StrCat("shard ", options_.shard)));
}

void Shard::Gone(const void* session) {
  const OutboxLock lock(outbox_, mutex_);
  std::optional<Wait> wait = state_.waiters.Take(session);
  if (wait.has_value()) Deliver(*wait, absl::CancelledError("the caller disconnected"));
}

void Shard::AnswerWaits() {
  const TimePoint now = options_.clock();
  state_.waiters.AnswerEach([&](Wait& wait) {
    mutex_.AssertHeld();
    return Deliver(wait, state_.AnswerNow(wait, now));
  });
  Discard();
}

// Moved, not copied: whoever lets go of a callback last may end its session, which must not be under this lock.
bool Shard::Deliver(Wait& wait, ShardState::Answer answer) {
  if (!answer.has_value()) return false;
  streams_.Close(wait.session);
  outbox_.Add([callback = std::move(wait.callback), answer = *std::move(answer)] { callback(answer); });
  return true;
}

// ---- The shard as a whole

void Shard::Fail(const std::string& reason, bool not_finite) {
  if (!state_.job.Fail(reason)) return;
  spdlog::error("{}", reason);
  v1::ShardReport report;
  report.set_failure(reason);
  report.set_not_finite(not_finite);
  Report(std::move(report));
}

void Shard::Report(v1::ShardReport report) {
  state_.Fill(&report);
  told_version_ = report.applied_version();
  outbox_.Add([this, report = std::move(report)] { report_(report); });
}

void Shard::ReportFailure(const std::string& reason) {
  const OutboxLock lock(outbox_, mutex_);
  Fail(reason);
}

void Shard::Tick(TimePoint now) {
  const OutboxLock lock(outbox_, mutex_);
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
  for (Wait& wait : state_.waiters.TakeExpired(now)) Deliver(wait, state_.TimedOut(wait, now));
}

void Shard::SayHeld(TimePoint now) {
  if (state_.cut.HeldFor(now) < kSayHeld || now < say_held_at_) return;
  say_held_at_ = now + kSayHeld;
  spdlog::warn("{}", state_.WaitingForCut(now));
}

void Shard::Shutdown(const absl::Status& status) {
  const OutboxLock lock(outbox_, mutex_);
  state_.job.Shutdown(status);
  AnswerWaits();
}

void Shard::StopApplying() {
  Parameters* parameters = nullptr;
  {
    MutexLock lock(mutex_);
    parameters = state_.parameters.get();
  }
  if (parameters != nullptr) parameters->ClearOnRelease();  // It waits for a hook that may want the lock.
  pool_.Stop();
}

v1::ShardStatusReply Shard::Status(TimePoint now) const {
  MutexLock lock(mutex_);
  return state_.Status(now);
}

uint64_t Shard::version() const {
  MutexLock lock(mutex_);
  return state_.parameters == nullptr ? 0 : state_.parameters->version();
}

std::shared_ptr<const ShardLayout> Shard::layout() const {
  MutexLock lock(mutex_);
  return state_.layout;
}

bool Shard::IsMember(const v1::Identity& id) const {
  MutexLock lock(mutex_);
  return state_.job.IsMember(id);
}

std::map<uint32_t, uint64_t> Shard::MemberIncarnations() const {
  MutexLock lock(mutex_);
  return state_.job.MemberIncarnations();
}

// ---- What all shards measure before any of them applies it.

void Shard::OnNorms(const v1::NormTotals& totals) {
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

void Shard::OnPushMeasured(v1::NormSums sums) {
  const OutboxLock lock(outbox_, mutex_);
  const v1::NormRound& round = sums.round();
  // Not if it was dropped or refused meanwhile.
  if (state_.pushes.FindComplete(round.rank(), round.incarnation(), round.step()) == nullptr) return;
  v1::ShardReport report;
  *report.add_norms() = std::move(sums);
  Report(std::move(report));
}

void Shard::ReportNorms() {
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

}  // namespace ps
