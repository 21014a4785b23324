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
  const absl::StatusOr<Ahead> ahead = PlaceSlices(header, std::move(slices), now, caller);
  if (!ahead.ok()) return ahead.status();
  if (ahead->slices.empty()) return absl::OkStatus();
  for (const size_t local : ahead->slices) BuildSlice(*ahead->build, local);  // The gradients are in this core's cache.
  OnBuilt(ahead->slices.size());
  return absl::OkStatus();
}

absl::StatusOr<Shard::Ahead> Shard::PlaceSlices(const v1::PushRequest& header, std::vector<ReceivedSlice> slices,
                                                TimePoint now, const void* caller) {
  const ReceivedSlice* not_finite = FindNotFinite(slices, isa_);  // The costly check, without the lock.
  const uint32_t rank = header.id().rank();
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  now_ = now;
  PS_RETURN_IF_ERROR(Serving());
  if (Fenced(header.id()) || ledger_.Seen(rank, header.step())) return Ahead();
  last_heard_[rank] = now;
  if (Complete(rank, header.step())) return Ahead();
  const absl::StatusOr<std::shared_ptr<Push>> found = FindOrBeginPush(header);
  if (!found.ok()) return found.status();
  Push& push = **found;
  push.caller = caller;
  std::vector<size_t> arrived;
  const std::string who = absl::StrCat("rank ", rank, ", step ", header.step());
  for (ReceivedSlice& slice : slices) {
    absl::Status checked = CheckSlice(slice);
    if (checked.ok() && header.samples() == 0)
      checked = absl::InvalidArgumentError("there are slices, but samples is 0");
    if (checked.ok() && &slice == not_finite) {
      const std::string& tensor = plan_->layout()[plan_->slices()[slice.index].tensor].name;
      checked = absl::InvalidArgumentError(absl::StrCat("the gradient of tensor ", tensor, " is not finite"));
    }
    if (!checked.ok()) {
      DropPush(rank);
      return Annotate(checked, who);
    }
    const auto local = static_cast<size_t>(local_index_[slice.index]);
    if (push.slices[local].bytes() > 0) continue;  // Sent again; the first counts.
    push.slices[local] = std::move(slice.payload);
    ++push.received;
    arrived.push_back(local);
  }
  Ahead ahead;
  ahead.slices = BuildAhead(push, arrived);
  if (!ahead.slices.empty()) ahead.build = building_;
  if (header.samples() == 0 || push.received == push.slices.size()) CompletePush(rank);
  return ahead;
}

bool Shard::Complete(uint32_t rank, uint64_t step) const {
  const auto ready = ready_.find(rank);
  if (ready != ready_.end() && ready->second->step == step) return true;
  const auto holds = [&](const std::shared_ptr<Build>& build) {
    for (size_t i = 0; i < build->ranks.size(); ++i) {
      if (build->ranks[i] == rank && build->pushes[i]->step == step) return true;
    }
    return false;
  };
  return (building_ != nullptr && building_->decided && holds(building_)) ||
         std::any_of(decided_.begin(), decided_.end(), holds);
}

std::shared_ptr<Shard::Push> Shard::FindPush(uint32_t rank, uint64_t step) const {
  for (const auto* pushes : {&ready_, &assembling_}) {
    const auto found = pushes->find(rank);
    if (found != pushes->end() && found->second->step == step) return found->second;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<Shard::Push>> Shard::FindOrBeginPush(const v1::PushRequest& header) {
  const uint32_t rank = header.id().rank();
  const std::string who = absl::StrCat("rank ", rank, ", step ", header.step());
  if (view_.phase() != v1::PHASE_RUNNING) {
    return absl::FailedPreconditionError(absl::StrCat(who, ": the job is not running yet: ", view_.waiting_for()));
  }
  // A new owner of the rank starts where its join said, which may be further on.
  const bool first = ledger_.Incarnation(rank) != header.id().incarnation();
  const uint64_t expected = first ? std::max(ledger_.NextStep(rank), header.step()) : ledger_.NextStep(rank);
  const Admission admission = mode_->Admit(
      {.rank = rank, .step = header.step(), .version = header.version(), .samples = header.samples()}, expected);
  PS_RETURN_IF_ERROR(admission.why);
  if (ready_.contains(rank)) {
    return absl::FailedPreconditionError(
        absl::StrCat(who, ": step ", ready_[rank]->step, " of this rank is still in progress"));
  }
  if (header.version() > store_->version()) {
    return absl::InvalidArgumentError(absl::StrCat(who, ": computed on version ", header.version(), ", but shard ",
                                                   options_.shard, " is at version ", store_->version()));
  }
  const auto found = assembling_.find(rank);
  if (found != assembling_.end()) {
    const Push& push = *found->second;
    if (push.step == header.step() && push.samples == header.samples() && push.version == header.version()) {
      return found->second;
    }
    DropPush(rank);  // The rank restarts this push, or begins another.
  }
  const uint64_t bytes =
      header.samples() == 0 ? 0 : static_cast<uint64_t>(plan_->shard_elements(options_.shard)) * sizeof(float);
  if (inflight_bytes_ + bytes > max_inflight_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(who, ": shard ", options_.shard, " holds ", inflight_bytes_,
                                                     " bytes of gradients; with ", bytes, " more it would exceed ",
                                                     "--max_inflight_bytes=", max_inflight_bytes_));
  }
  inflight_bytes_ += bytes;
  auto push = std::make_shared<Push>();
  push->incarnation = header.id().incarnation();
  push->step = header.step();
  push->version = header.version();
  push->samples = header.samples();
  push->slices.resize(plan_->shard_slices(options_.shard).size());
  push->reserved_bytes = bytes;
  assembling_[rank] = push;
  CheckDone();
  return push;
}

void Shard::DropPush(uint32_t rank) {
  const auto push = assembling_.find(rank);
  if (push == assembling_.end()) return;
  if (building_ != nullptr && !building_->decided) DropBuild();
  inflight_bytes_ -= push->second->reserved_bytes;
  assembling_.erase(push);
  CheckDone();
}

void Shard::CompletePush(uint32_t rank) {
  const Push& push = *(ready_[rank] = assembling_.extract(rank).mapped());
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

}  // namespace ps
