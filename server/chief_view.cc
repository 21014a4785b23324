// The chief and its shards: views, phases and decisions.
#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/layout_proto.h"
#include "common/status.h"
#include "common/text.h"
#include "server/chief.h"

namespace ps {
namespace {

constexpr size_t kMaxSettingBytes = 512;  // Of an address or setting from the wire.

absl::Status CheckRegistrationTexts(const v1::Registration& registration) {
  PS_RETURN_IF_ERROR(CheckText("--job", registration.job(), kMaxSettingBytes));
  PS_RETURN_IF_ERROR(CheckText("--advertise", registration.address(), kMaxSettingBytes));
  for (const auto& [flag, value] : registration.settings()) {
    PS_RETURN_IF_ERROR(CheckText("the name of a setting", flag, kMaxSettingBytes));
    PS_RETURN_IF_ERROR(CheckText("--" + flag, value, kMaxSettingBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Chief::RegisterShard(const v1::Registration& registration, SendFunction send, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (absl::Status serving = Serving(); !serving.ok()) return serving;
  PS_RETURN_IF_ERROR(CheckRegistrationTexts(registration));
  if (registration.protocol() != v1::PROTOCOL_VERSION_1) {
    return absl::UnimplementedError(absl::StrCat("the shard uses protocol version ", registration.protocol(),
                                                 "; the chief supports version ", int{v1::PROTOCOL_VERSION_1}));
  }
  std::vector<std::string> differences;
  if (registration.job() != options_.job) {
    differences.push_back(absl::StrCat("--job=", registration.job(), " (the chief has ", options_.job, ")"));
  }
  for (const auto& [flag, value] : options_.settings) {
    const auto theirs = registration.settings().find(flag);
    const std::string other = theirs == registration.settings().end() ? "(unset)" : theirs->second;
    if (other != value) differences.push_back(absl::StrCat("--", flag, "=", other, " (the chief has ", value, ")"));
  }
  if (!differences.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("shard ", registration.shard(),
                     " was started with settings that differ from the chief's: ", absl::StrJoin(differences, ", ")));
  }
  if (registration.shard() >= options_.num_shards) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shard=", registration.shard(), ": expected 0 to ", options_.num_shards - 1));
  }
  ShardState& state = shards_[registration.shard()];
  if (state.registered) {
    return absl::AlreadyExistsError(
        absl::StrCat("--shard=", registration.shard(), ": already served by the server at ", state.address));
  }
  if (state.ever_registered && phase_ == v1::PHASE_RUNNING) {
    return absl::FailedPreconditionError(
        absl::StrCat("shard ", registration.shard(), " cannot rejoin a running job: its weights are lost"));
  }
  state = {.registered = true,
           .ever_registered = true,
           .address = registration.address(),
           .send = std::move(send),
           .gone_since = now};
  spdlog::info("shard {} at {} registered", registration.shard(), registration.address());
  ViewChanged(now);
  return absl::OkStatus();
}

void Chief::OnShardGone(uint32_t shard, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  ShardState& state = shards_[shard];
  if (!state.registered) return;
  state.registered = false;
  state.send = nullptr;
  state.initialised = false;
  state.acknowledged_view = 0;
  state.gone_since = now;
  if (phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED) return;
  spdlog::warn("shard {} at {}: connection lost", shard, state.address);
}

void Chief::OnReport(uint32_t shard, const v1::ShardReport& report, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  ShardState& state = shards_[shard];
  state.acknowledged_view = std::max(state.acknowledged_view, report.acknowledged_view());
  if (report.applied_version() > state.applied_version) last_progress_ = now;
  state.applied_version = std::max(state.applied_version, report.applied_version());
  state.highest_step = std::max(state.highest_step, report.highest_step());
  state.waiting_for = report.waiting_for();
  if (!report.failure().empty() && (phase_ == v1::PHASE_GATHERING || phase_ == v1::PHASE_RUNNING)) {
    SetPhase(v1::PHASE_FAILED, report.failure());
    return ViewChanged(now);
  }
  const bool of_this_model = plan_.has_value() && report.acknowledged_view() >= layout_view_;
  if (report.initialised() && of_this_model && !state.initialised) {
    state.initialised = true;
    if (AllShardsInitialised()) ViewChanged(now);
  }
  for (const v1::PushDone& done : report.complete()) CountComplete(shard, done, now);
  AnswerJoins(now);
  if (phase_ == v1::PHASE_GATHERING) TellWatches(now);  // The initialiser is told once all shards know it.
}

// Counts identities, never messages: a set of shards for each (step, rank).
void Chief::CountComplete(uint32_t shard, const v1::PushDone& done, TimePoint now) {
  if (!leads_steps_ || phase_ != v1::PHASE_RUNNING || done.step() < mode_->step()) return;
  last_progress_ = now;
  std::set<uint32_t>& have = complete_[{done.step(), done.rank()}];
  have.insert(shard);
  if (have.size() < options_.num_shards) return;
  v1::ChiefUpdate update;
  for (const StepSet& set : mode_->Complete(done.rank(), done.step())) {
    mode_->Decided(set);
    v1::StepDecision* decision = update.add_decisions();
    decision->set_step(set.step);
    for (uint32_t rank : set.ranks) decision->add_ranks(rank);
  }
  complete_.erase(complete_.begin(), complete_.lower_bound({mode_->step(), 0}));
  if (update.decisions_size() > 0) Broadcast(update);
}

void Chief::Broadcast(const v1::ChiefUpdate& update) {
  for (const ShardState& shard : shards_) {
    if (shard.send) outbox_.Add([send = shard.send, update] { send(update); });
  }
}

void Chief::SetPhase(v1::Phase phase, const std::string& failure) {
  phase_ = phase;
  failure_ = failure;
  if (phase == v1::PHASE_RUNNING)
    spdlog::info("the job is running: {} workers, {} shards", options_.num_workers, options_.num_shards);
  if (phase == v1::PHASE_FINISHED) spdlog::info("the job is finished");
  if (phase == v1::PHASE_FAILED) spdlog::error("the job failed: {}", failure);
}

bool Chief::AllShardsInitialised() const {
  return std::all_of(shards_.begin(), shards_.end(), [](const ShardState& shard) { return shard.initialised; });
}

bool Chief::MayInitialise(uint32_t rank) const {
  const auto knows = [view = initialiser_view_](const ShardState& shard) { return shard.acknowledged_view >= view; };
  return initialiser_ == rank && !AllShardsInitialised() && std::all_of(shards_.begin(), shards_.end(), knows);
}

void Chief::ViewChanged(TimePoint now) {
  const bool shards_here = MissingShards().empty();
  if (phase_ == v1::PHASE_GATHERING && shards_here && AllShardsInitialised() && membership_.full()) {
    last_progress_ = now;
    SetPhase(v1::PHASE_RUNNING, "");
  }
  if (!AllShardsInitialised() && (!initialiser_.has_value() || !membership_.members().contains(*initialiser_))) {
    initialiser_.reset();
    if (!membership_.members().empty()) initialiser_ = membership_.members().begin()->first;
    initialiser_view_ = view_ + 1;
  }
  ++view_;
  v1::ChiefUpdate update;
  *update.mutable_view() = MakeView(now);
  Broadcast(update);
  AnswerJoins(now);
  AnswerDone(now);
  TellWatches(now);
  if (phase_ == v1::PHASE_FINISHED || phase_ == v1::PHASE_FAILED) {
    outbox_.Add([this, phase = phase_, failure = failure_] { on_end_(phase, failure); });
  }
}

v1::View Chief::MakeView(TimePoint now) const {
  v1::View view;
  view.set_number(view_);
  view.set_generation(options_.generation);
  view.set_phase(phase_);
  view.set_failure(failure_);
  if (plan_.has_value()) *view.mutable_layout() = ToProto(plan_->layout());
  for (const auto& [rank, member] : membership_.members()) {
    v1::Member* out = view.add_members();
    out->set_rank(rank);
    out->set_incarnation(member.incarnation);
    out->set_name(member.name);
    out->set_initialiser(initialiser_ == rank);
    out->set_done(member.done);
  }
  view.set_waiting_for(WaitingFor(now));
  return view;
}

void Chief::AnswerJoins(TimePoint now) {
  const bool shards_here = MissingShards().empty();
  for (auto wait = joins_.begin(); wait != joins_.end();) {
    absl::StatusOr<v1::JoinReply> answer = absl::UnknownError("");
    Member* member = membership_.Find(wait->rank, wait->incarnation);
    const bool in_force = std::all_of(shards_.begin(), shards_.end(),
                                      [&](const ShardState& shard) { return shard.acknowledged_view >= wait->view; });
    if (absl::Status serving = Serving(); !serving.ok()) {
      answer = serving;
      if (member != nullptr) membership_.Remove(member->rank);  // Its join is answered with the failure.
    } else if (member == nullptr) {
      answer = absl::FailedPreconditionError("the worker left, or another joined under its name");
    } else if (shards_here && in_force) {
      // Once the view is in force the old owner of the rank is fenced, and the steps that the shards acknowledged it
      // with are its last ones.
      member->start_step = member->step = StartStep();
      member->last_heard = now;  // Its heartbeats begin with the answer.
      spdlog::info("{} starts at step {}", member->ToString(), member->start_step);
      answer = MakeJoinReply(*member);
    } else if (wait->deadline <= now) {
      answer = absl::DeadlineExceededError("joining: " + WaitingFor(now));
    } else {
      ++wait;
      continue;
    }
    outbox_.Add([callback = std::move(wait->callback), answer = std::move(answer)] { callback(answer); });
    wait = joins_.erase(wait);
  }
}

std::vector<uint32_t> Chief::MissingShards() const {
  std::vector<uint32_t> missing;
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    if (!shards_[shard].registered) missing.push_back(shard);
  }
  return missing;
}

std::string Chief::WaitingFor(TimePoint now) const {
  const std::vector<uint32_t> missing = MissingShards();
  if (!missing.empty()) return absl::StrCat("waiting for shard ", absl::StrJoin(missing, ", "), " to register");
  if (phase_ == v1::PHASE_GATHERING) {
    const size_t here = membership_.members().size();
    if (here < options_.num_workers) {
      return absl::StrCat("waiting for ", options_.num_workers - here, " of ", options_.num_workers,
                          " workers to join");
    }
    return absl::StrCat("waiting for the initial weights from ", membership_.Describe({initialiser_.value_or(0)}, now));
  }
  if (phase_ != v1::PHASE_RUNNING) return "";
  for (const ShardState& shard : shards_) {
    if (!shard.waiting_for.empty()) return shard.waiting_for;
  }
  std::vector<uint32_t> ranks;
  uint64_t lowest = UINT64_MAX;
  for (const auto& [rank, member] : membership_.members()) {
    if (!member.done) lowest = std::min(lowest, member.step);
  }
  for (const auto& [rank, member] : membership_.members()) {
    if (!member.done && member.step == lowest) ranks.push_back(rank);
  }
  if (ranks.empty() && !lead_left_ && membership_.Lead() != nullptr) {
    return absl::StrCat("all workers are done: waiting for ", membership_.Lead()->ToString(), " to evaluate and leave");
  }
  if (ranks.empty()) return "waiting for all workers to leave";
  const bool some_ahead = ranks.size() < membership_.members().size();
  if (!some_ahead) return "";
  return absl::StrCat("step ", lowest, ": waiting for ", membership_.Describe(ranks, now));
}

}  // namespace ps
