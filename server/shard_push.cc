// Pushes: from their slices to the version that they make.
#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/shard.h"

namespace ps {
namespace {

// The first slice with a value that is not finite, or null.
const ReceivedSlice* FindNotFinite(const std::vector<ReceivedSlice>& slices, Isa isa) {
  for (const ReceivedSlice& slice : slices) {
    if (slice.payload.bytes() % sizeof(float) == 0 && !AllFinite(slice.payload, isa)) return &slice;
  }
  return nullptr;
}

}  // namespace

absl::Status Shard::AddSlices(const v1::PushRequest& header, std::vector<ReceivedSlice> slices, TimePoint now,
                              const void* caller) {
  const ReceivedSlice* not_finite = FindNotFinite(slices, isa_);  // The costly look, without the lock.
  const uint32_t rank = header.id().rank();
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  PS_RETURN_IF_ERROR(Serving());
  if (Fenced(header.id()) || ledger_.Seen(rank, header.step())) return absl::OkStatus();
  last_heard_[rank] = now;
  if (Complete(rank, header.step())) return absl::OkStatus();
  absl::StatusOr<Push*> push = FindOrBeginPush(header);
  if (!push.ok()) return push.status();
  (*push)->caller = caller;
  const std::string who = absl::StrCat("rank ", rank, ", step ", header.step());
  for (ReceivedSlice& slice : slices) {
    absl::Status checked = CheckSlice(slice);
    if (checked.ok() && header.samples() == 0) checked = absl::InvalidArgumentError("slices, but samples is 0");
    if (checked.ok() && &slice == not_finite) {
      const std::string& tensor = plan_->layout()[plan_->slices()[slice.index].tensor].name;
      checked = absl::InvalidArgumentError(absl::StrCat("the gradient of tensor ", tensor, " is not finite"));
    }
    if (!checked.ok()) {
      DropPush(rank);
      return Annotate(checked, who);
    }
    Payload& place = (*push)->slices[static_cast<size_t>(local_index_[slice.index])];
    if (place.bytes() > 0) continue;  // Sent again; the first counts.
    place = std::move(slice.payload);
    ++(*push)->received;
  }
  if (header.samples() == 0 || (*push)->received == (*push)->slices.size()) CompletePush(rank);
  return absl::OkStatus();
}

bool Shard::Complete(uint32_t rank, uint64_t step) const {
  const auto ready = ready_.find(rank);
  if (ready != ready_.end() && ready->second.step == step) return true;
  for (const ApplyTask& task : apply_queue_) {
    for (size_t i = 0; i < task.ranks.size(); ++i) {
      if (task.ranks[i] == rank && task.pushes[i].step == step) return true;
    }
  }
  return false;
}

absl::StatusOr<Shard::Push*> Shard::FindOrBeginPush(const v1::PushRequest& header) {
  const uint32_t rank = header.id().rank();
  const std::string who = absl::StrCat("rank ", rank, ", step ", header.step());
  if (view_.phase() != v1::PHASE_RUNNING) {
    return absl::FailedPreconditionError(absl::StrCat(who, ": the job is not running yet: ", view_.waiting_for()));
  }
  const uint64_t expected = std::max(ledger_.NextStep(rank), members_[rank].start_step());
  PS_RETURN_IF_ERROR(mode_->Admit(rank, header.step(), expected));
  if (ready_.contains(rank)) {
    return absl::FailedPreconditionError(
        absl::StrCat(who, ": step ", ready_[rank].step, " of this rank has no answer yet"));
  }
  if (header.version() > store_->version()) {
    return absl::InvalidArgumentError(absl::StrCat(who, ": computed on version ", header.version(), ", but shard ",
                                                   options_.shard, " is at version ", store_->version()));
  }
  const auto found = assembling_.find(rank);
  if (found != assembling_.end()) {
    Push& push = found->second;
    if (push.step == header.step() && push.samples == header.samples() && push.version == header.version()) {
      return &push;
    }
    DropPush(rank);  // The rank starts it anew, or another.
  }
  const uint64_t bytes =
      header.samples() == 0 ? 0 : static_cast<uint64_t>(plan_->shard_elements(options_.shard)) * sizeof(float);
  if (inflight_bytes_ + bytes > max_inflight_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(who, ": shard ", options_.shard, " holds ", inflight_bytes_,
                                                     " bytes of gradients; with ", bytes, " more it would exceed ",
                                                     "--max_inflight_bytes=", max_inflight_bytes_));
  }
  inflight_bytes_ += bytes;
  Push& push = assembling_[rank];
  push = {.incarnation = header.id().incarnation(),
          .step = header.step(),
          .version = header.version(),
          .samples = header.samples(),
          .slices = std::vector<Payload>(plan_->shard_slices(options_.shard).size()),
          .reserved_bytes = bytes};
  return &push;
}

void Shard::DropPush(uint32_t rank) {
  const auto push = assembling_.find(rank);
  if (push == assembling_.end()) return;
  inflight_bytes_ -= push->second.reserved_bytes;
  assembling_.erase(push);
}

void Shard::CompletePush(uint32_t rank) {
  auto node = assembling_.extract(rank);
  const Push& push = ready_[rank] = std::move(node.mapped());
  if (follows_decisions_) {
    v1::ShardReport report;
    v1::PushDone* done = report.add_complete();
    done->set_rank(rank);
    done->set_step(push.step);
    done->set_samples(push.samples);
    Report(std::move(report));
    return;
  }
  for (const StepSet& set : mode_->Complete(rank, push.step)) Decide(set);
}

void Shard::Decide(const StepSet& set) {
  if (gathers_ && set.step < mode_->step()) return;  // Said twice.
  ApplyTask task;
  uint64_t total = 0;
  for (uint32_t rank : set.ranks) {
    auto node = ready_.extract(rank);
    if (node.empty() || (gathers_ && node.mapped().step != set.step)) {
      shutdown_ = absl::InternalError(absl::StrCat("step ", set.step, ": the push of rank ", rank,
                                                   " was decided on but is not on shard ", options_.shard));
      spdlog::error("{}", Message(shutdown_));
      return;
    }
    total += node.mapped().samples;
    task.ranks.push_back(rank);
    task.pushes.push_back(std::move(node.mapped()));
  }
  for (const Push& push : task.pushes) {
    task.coefficients.push_back(total == 0 ? 0.0F : Coefficient(push.samples, total));
  }
  mode_->Decided(set);
  apply_queue_.push_back(std::move(task));
  StartApply();
}

void Shard::StartApply() {
  if (applying_ || apply_queue_.empty()) return;
  const VersionStore::Update* update = store_->BeginUpdate();
  if (update == nullptr) return;  // All buffers are pinned; the store calls when one is free.
  applying_ = true;
  ApplyTask& task = apply_queue_.front();
  task.began = Now();
  pool_.Post(
      plan_->shard_slices(options_.shard).size(),
      [this, &task, update = *update](size_t local) { ApplySlice(task, update, local); }, [this] { FinishApply(); });
}

void Shard::ApplySlice(const ApplyTask& task, const VersionStore::Update& update, size_t local) const {
  const SliceInfo& info = plan_->slices()[plan_->shard_slices(options_.shard)[local]];
  std::vector<GradientTerm> terms;
  for (size_t i = 0; i < task.pushes.size(); ++i) {
    if (task.pushes[i].samples == 0) continue;
    terms.push_back({.gradient = &task.pushes[i].slices[local], .coefficient = task.coefficients[i]});
  }
  OptimizerBlock slice = {.elements = static_cast<size_t>(info.elements),
                          .weights = update.weights + info.shard_offset,
                          .new_weights = update.new_weights + info.shard_offset};
  for (size_t k = 0; k < state_.size(); ++k) {
    slice.state[k] = slice.new_state[k] = const_cast<float*>(state_[k].data()) + info.shard_offset;
  }
  ReduceAndApply(terms, slice, *optimizer_, options_.hyperparameters, isa_);
}

void Shard::FinishApply() {
  ApplyTask task;  // Its payloads are freed last, without the lock.
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  task = std::move(apply_queue_.front());
  apply_queue_.pop_front();
  applying_ = false;
  RecordApply(task);
  AnswerWaits();
  StartApply();
}

void Shard::RecordApply(const ApplyTask& task) {
  nlohmann::ordered_json staleness = nlohmann::ordered_json::array();
  for (size_t i = 0; i < task.ranks.size(); ++i) {
    const Push& push = task.pushes[i];
    ledger_.Record(task.ranks[i], push.step, v1::APPLIED);
    inflight_bytes_ -= push.reserved_bytes;
    staleness.push_back(store_->version() - push.version);
  }
  store_->Publish();
  if (metrics_->enabled()) {
    metrics_->Write("apply", {{"version", store_->version()},
                              {"contributions", task.ranks.size()},
                              {"ranks", task.ranks},
                              {"staleness", std::move(staleness)},
                              {"apply_s", Seconds(Now() - task.began)}});
  }
  if (follows_decisions_) Report({});
}

}  // namespace ps
