#include "server/shard.h"

#include <algorithm>
#include <cassert>
#include <set>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/layout_proto.h"
#include "common/status.h"

namespace ps {

Shard::Shard(const ShardOptions& options, ReportFunction report, MetricsWriter* metrics)
    : options_(options),
      report_(std::move(report)),
      metrics_(metrics),
      optimizer_(*MakeOptimizer(options.optimizer)),
      mode_(*MakeMode(options.mode, options.num_workers)),
      pool_(options.apply_threads) {
  synchronous_ = mode_->synchronous();
  follows_decisions_ = synchronous_ && options.num_shards > 1;
}

Shard::~Shard() {
  Shutdown(absl::CancelledError("the server is shutting down"));
  StopApplying();
}

// ---- Updates from the chief

void Shard::OnChiefUpdate(const v1::ChiefUpdate& update) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (update.has_view() && update.view().number() > view_.number()) SetView(update.view());
  for (const v1::StepDecision& decision : update.decisions()) {
    Decide({.step = decision.step(), .ranks = {decision.ranks().begin(), decision.ranks().end()}});
  }
  AnswerWaits();
}

void Shard::SetView(const v1::View& view) {
  view_ = view;
  if (view.phase() == v1::PHASE_GATHERING && view.layout().tensors_size() == 0 && plan_ != nullptr && shutdown_.ok()) {
    DropLayout();
  }
  if (plan_ == nullptr && view.layout().tensors_size() > 0) SetLayout(view.layout());
  members_.clear();
  std::set<uint32_t> ranks;
  for (const v1::Member& member : view.members()) {
    members_[member.rank()] = member;
    done_.erase(member.rank());
    if (member.done()) done_[member.rank()] = member.name();  // Also when it has left.
    ranks.insert(member.rank());
  }
  mode_->SetMembers(ranks);
  std::vector<uint32_t> fenced;
  for (const auto& [rank, push] : assembling_) {
    const auto member = members_.find(rank);
    if (member == members_.end() || member->second.incarnation() != push->incarnation) fenced.push_back(rank);
  }
  for (uint32_t rank : fenced) DropPush(rank);
  CheckDone();
  v1::ShardReport report;
  report.set_acknowledged_view(view.number());
  Report(std::move(report));
}

void Shard::SetLayout(const v1::ModelLayout& layout) {
  plan_ = std::make_unique<SlicePlan>(FromProto(layout), options_.num_shards);
  local_index_.assign(plan_->slices().size(), -1);
  const auto& mine = plan_->shard_slices(options_.shard);
  for (size_t local = 0; local < mine.size(); ++local) local_index_[mine[local]] = static_cast<int32_t>(local);
  initial_slices_.assign(mine.size(), false);
  const auto elements = static_cast<size_t>(plan_->shard_buffer_elements(options_.shard));
  for (int k = 0; k < optimizer_->state_tensors(); ++k) {
    state_.emplace_back(elements, optimizer_->InitialState(k, options_.hyperparameters));
  }
  store_ = std::make_unique<VersionStore>(elements, options_.max_versions, [this] {
    MutexLock lock(mutex_);
    StartBuild();  // Makes no callbacks: this may run wherever a pin is released, even inside a gRPC call.
  });
  const auto push_bytes = static_cast<uint64_t>(plan_->shard_elements(options_.shard)) * sizeof(float);
  max_inflight_bytes_ =
      options_.max_inflight_bytes > 0 ? options_.max_inflight_bytes : 2 * options_.num_workers * push_bytes;
  const uint64_t needed = (synchronous_ ? options_.num_workers : 1) * push_bytes;
  if (max_inflight_bytes_ < needed) {
    FailJob(absl::StrCat("--max_inflight_bytes=", max_inflight_bytes_, " on shard ", options_.shard, ": ",
                         options_.mode, " needs at least ", needed, " for this model"));
  }
  if (mine.empty()) initialised_ = true;
}

void Shard::DropLayout() {
  // Nothing was pushed or pulled yet: both are for a job that runs.
  assert(building_ == nullptr && decided_.empty() && assembling_.empty() && ready_.empty());
  assert(store_ == nullptr || (store_->version() == 0 && store_->Readings().empty()));
  store_ = nullptr;
  state_.clear();
  next_state_.clear();
  local_index_.clear();
  plan_ = nullptr;
  max_inflight_bytes_ = 0;
  initial_slices_.clear();
  initialiser_ = 0;
  initialised_ = false;
  done_.clear();
}

void Shard::ReportFailure(const std::string& reason) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  FailJob(reason);
}

void Shard::FailJob(const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason;
  spdlog::error("{}", reason);
  v1::ShardReport report;
  report.set_failure(reason);
  Report(std::move(report));
}

void Shard::CheckDone() {
  if (done_.empty() || view_.phase() != v1::PHASE_RUNNING) return;
  std::set<uint32_t> begun;
  for (const auto* pushes : {&ready_, &assembling_}) {
    for (const auto& [rank, push] : *pushes) {
      if (push->step == mode_->step()) begun.insert(rank);
    }
  }
  std::set<uint32_t> done;
  for (const auto& [rank, name] : done_) done.insert(rank);
  const std::optional<uint32_t> needed = mode_->NeedsDone(begun, done);
  if (!needed.has_value()) return;
  FailJob(absl::StrCat("step ", mode_->step(), ": rank ", *needed, " (", done_[*needed],
                       ") is done, but its push of this step is needed"));
}

void Shard::SetChiefLost(bool lost) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  chief_lost_ = lost;
  AnswerWaits();
}

void Shard::Report(v1::ShardReport report) {
  if (view_.number() > report.acknowledged_view()) report.set_acknowledged_view(view_.number());
  report.set_initialised(initialised_ && plan_ != nullptr);
  report.set_applied_version(store_ == nullptr ? 0 : store_->version());
  report.set_highest_step(HighestStep());
  report.set_waiting_for(reported_blocked_);
  outbox_.Add([this, report = std::move(report)] { report_(report); });
}

uint64_t Shard::HighestStep() const {
  uint64_t highest = ledger_.HighestStep();
  const auto see = [&](const std::shared_ptr<Push>& push) { highest = std::max(highest, push->step + 1); };
  for (const auto& [rank, push] : ready_) see(push);
  for (const auto& build : decided_) std::for_each(build->pushes.begin(), build->pushes.end(), see);
  if (building_ != nullptr && building_->decided) {
    std::for_each(building_->pushes.begin(), building_->pushes.end(), see);
  }
  return highest;
}

absl::Status Shard::Failed() const {
  if (view_.phase() == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + view_.failure());
  return failure_.empty() ? absl::OkStatus() : absl::AbortedError("the job failed: " + failure_);
}

absl::Status Shard::ServingReads(bool member) const {
  if (!shutdown_.ok()) return shutdown_;
  if (view_.phase() == v1::PHASE_FINISHED) return absl::OkStatus();
  // The weights of a failed job may still be read.
  if (const absl::Status failed = Failed(); !failed.ok()) {
    return member || !initialised_ || ruined_ ? failed : absl::OkStatus();
  }
  return Serving();
}

absl::Status Shard::Serving() const {
  if (!shutdown_.ok()) return shutdown_;
  PS_RETURN_IF_ERROR(Failed());
  if (view_.phase() == v1::PHASE_FINISHED) return absl::FailedPreconditionError("the job is finished");
  if (chief_lost_) {
    return absl::UnavailableError(absl::StrCat("shard ", options_.shard, " has not heard from the chief for too long"));
  }
  return absl::OkStatus();
}

bool Shard::IsMember(const v1::Identity& id) const {
  MutexLock lock(mutex_);
  return !Fenced(id);
}

std::map<uint32_t, uint64_t> Shard::MemberIncarnations() const {
  MutexLock lock(mutex_);
  std::map<uint32_t, uint64_t> incarnations;
  for (const auto& [rank, member] : members_) incarnations[rank] = member.incarnation();
  return incarnations;
}

bool Shard::Fenced(const v1::Identity& id) const {
  if (id.job() != options_.job || id.generation() != view_.generation()) return true;
  const auto member = members_.find(id.rank());
  return member == members_.end() || member->second.incarnation() != id.incarnation();
}

// ---- Initial values

absl::Status Shard::AddInitialSlices(const v1::Identity& id, const std::vector<ReceivedSlice>& slices) {
  for (const ReceivedSlice& slice : slices) {
    if (slice.payload.bytes() % sizeof(float) == 0 && AllFinite(slice.payload, isa_)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", id.rank(), ": the initial values of slice ", slice.index, " are not finite"));
  }
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  PS_RETURN_IF_ERROR(Serving());
  if (initialised_) return absl::OkStatus();
  const auto member = members_.find(id.rank());
  if (plan_ == nullptr || Fenced(id) || !member->second.initialiser()) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", id.rank(), " was not chosen to send the initial values"));
  }
  if (initialiser_ != id.incarnation() * options_.num_workers + id.rank()) {
    initialiser_ = id.incarnation() * options_.num_workers + id.rank();
    initial_slices_.assign(initial_slices_.size(), false);
  }
  for (const ReceivedSlice& slice : slices) {
    PS_RETURN_IF_ERROR(Annotate(CheckSlice(slice), absl::StrCat("rank ", id.rank(), ", initial values")));
    const SliceInfo& info = plan_->slices()[slice.index];
    slice.payload.CopyTo(store_->initial_weights() + info.shard_offset);
    initial_slices_[static_cast<size_t>(local_index_[slice.index])] = true;
  }
  initialised_ = std::find(initial_slices_.begin(), initial_slices_.end(), false) == initial_slices_.end();
  if (initialised_) Report({});
  return absl::OkStatus();
}

absl::Status Shard::CheckInitialised() {
  MutexLock lock(mutex_);
  if (initialised_) return absl::OkStatus();
  const auto here = std::count(initial_slices_.begin(), initial_slices_.end(), true);
  return absl::InvalidArgumentError(absl::StrCat("initial values: ", here, " of the ", initial_slices_.size(),
                                                 " slices of shard ", options_.shard, " arrived"));
}

absl::Status Shard::CheckSlice(const ReceivedSlice& slice) const {
  if (slice.index >= local_index_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", slice.index, ": the model's slices are 0 to ", local_index_.size() - 1));
  }
  if (local_index_[slice.index] < 0) {
    return absl::InvalidArgumentError(absl::StrCat("slice ", slice.index, " is shard ",
                                                   plan_->slices()[slice.index].shard, "'s, not shard ", options_.shard,
                                                   "'s"));
  }
  const SliceInfo& info = plan_->slices()[slice.index];
  if (slice.payload.bytes() != static_cast<size_t>(info.bytes())) {
    return absl::InvalidArgumentError(absl::StrCat("slice ", slice.index, " of tensor ",
                                                   plan_->layout()[info.tensor].name, ": ", slice.payload.bytes(),
                                                   " bytes, expected ", info.bytes()));
  }
  return absl::OkStatus();
}

// ---- The shard as a whole

void Shard::Tick(TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  now_ = now;
  ReportBlocked(now);
  AnswerWaits();  // A member's pull may have waited for its older pins; their release notifies nobody.
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    const auto next = std::next(wait);
    if (wait->deadline <= now) {
      Fail(*wait, absl::DeadlineExceededError(Describe(*wait, now)));
      waits_.erase(wait);
    }
    wait = next;
  }
}

void Shard::Shutdown(const absl::Status& status) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (shutdown_.ok()) shutdown_ = status;
  AnswerWaits();
}

void Shard::StopApplying() {
  VersionStore* store = nullptr;
  {
    MutexLock lock(mutex_);
    store = store_.get();
  }
  if (store != nullptr) store->ClearOnRelease();
  pool_.Stop();
}

v1::ShardStatusReply Shard::Status(TimePoint now) {
  MutexLock lock(mutex_);
  v1::ShardStatusReply status = counts_;
  status.set_shard(options_.shard);
  if (plan_ != nullptr) {
    status.set_version(store_->version());
    status.set_slices(static_cast<uint32_t>(plan_->shard_slices(options_.shard).size()));
    status.set_bytes(static_cast<uint64_t>(plan_->shard_elements(options_.shard)) * sizeof(float));
  }
  status.set_inflight_bytes(inflight_bytes_);
  status.set_inflight_bytes_max(max_inflight_bytes_);
  status.set_parked(static_cast<uint32_t>(waits_.size()));
  const auto of_others = std::count_if(waits_.begin(), waits_.end(), [](const Wait& w) { return w.incarnation == 0; });
  status.set_parked_others(static_cast<uint32_t>(of_others));
  if (!waits_.empty() || blocked_since_.has_value()) status.set_waiting_for(WaitingFor(now));
  return status;
}

const SlicePlan* Shard::plan() {
  MutexLock lock(mutex_);
  return plan_.get();
}

}  // namespace ps
