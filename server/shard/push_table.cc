#include "server/shard/push_table.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

Ledger::Last LastOf(const Push& push, v1::Answer answer) {
  return {.rank = push.rank, .incarnation = push.incarnation, .step = push.step, .answer = answer, .runs = push.runs};
}

constexpr uint64_t kMaxPassed = uint64_t{1} << 40;  // Samples, of a push.

std::string ContributionName(v1::Contribution contribution) {
  switch (contribution) {
    case v1::CONTRIBUTION_GRADIENT:
      return "gradient";
    case v1::CONTRIBUTION_WEIGHT_DIFFERENCE:
      return "difference of weights";
    default:
      return absl::StrCat("contribution ", int{contribution});
  }
}

uint64_t PassedOf(const v1::PushRequest& header) { return header.has_passed() ? header.passed() : header.samples(); }

std::optional<float> LearningRateOf(const v1::PushRequest& header) {
  return header.has_learning_rate() ? std::optional<float>(header.learning_rate()) : std::nullopt;
}

absl::Status CheckNumbers(const v1::PushRequest& header) {
  const std::string who = absl::StrCat("rank ", header.id().rank(), ", step ", header.step());
  if (PassedOf(header) > kMaxPassed) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, ": passed is ", header.passed(), " samples; at most ", kMaxPassed, " are supported"));
  }
  const float rate = header.learning_rate();
  if (std::isfinite(rate) && rate >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(who, ": learning_rate=", rate, ": expected a number of 0 or more"));
}

// Nothing of it is here yet.
Push PushOf(const v1::PushRequest& header) {
  Push push;
  push.rank = header.id().rank();
  push.incarnation = header.id().incarnation();
  push.step = header.step();
  push.version = header.version();
  push.samples = header.samples();
  push.passed = PassedOf(header);
  push.edition = header.edition();
  push.runs = header.runs();
  push.contribution = header.contribution();
  push.learning_rate = LearningRateOf(header);
  return push;
}

}  // namespace

void PushTable::SetLayout(std::shared_ptr<const ShardLayout> layout, uint64_t max_inflight_bytes) {
  Check(assembling_.empty() && complete_.empty() && taken_.empty(), "no push is in progress when the layout changes");
  layout_ = std::move(layout);
  max_inflight_bytes_ = max_inflight_bytes;
}

// ---- From nothing to complete

absl::StatusOr<PushTable::Arrival> PushTable::Add(const void* session, const v1::PushRequest& header,
                                                  std::vector<ReceivedSlice> slices, std::optional<size_t> not_finite,
                                                  const Mode& mode, uint64_t newest) {
  const uint32_t rank = header.id().rank();
  if (ledger_.Seen(rank, header.step()) || IsComplete(rank, header.step()) || IsReplaced(header)) return Arrival();
  PS_RETURN_IF_ERROR(CheckContribution(header, mode));
  PS_RETURN_IF_ERROR(CheckNumbers(header));
  const Admission admission = Admit(header, mode);
  if (admission.kind == Admission::Kind::kReject) return admission.why;
  if (admission.kind == Admission::Kind::kStale) {
    if (assembling_.contains(rank)) Drop(rank);
    Refuse(PushOf(header));
    return Arrival();
  }
  const absl::StatusOr<std::shared_ptr<Push>> found = FindOrBegin(header, newest);
  if (!found.ok()) return found.status();
  Arrival arrival = {.push = *found, .slices = {}};
  Push& push = **found;
  push.session = session;
  for (size_t i = 0; i < slices.size(); ++i) {
    ReceivedSlice& slice = slices[i];
    const absl::StatusOr<size_t> local = CheckSlice(header, slice, /*finite=*/not_finite != i);
    if (!local.ok()) {
      Drop(rank);
      return Annotate(local.status(), absl::StrCat("rank ", rank, ", step ", header.step()));
    }
    if (push.has(*local)) continue;
    push.slices[*local] = std::move(slice.payload);
    ++push.received;
    if (push.slices[*local].absent()) ++push.absent;
    arrival.slices.push_back(*local);
  }
  return arrival;
}

// A message of a call that was given up may come after those of the call that took its place.
bool PushTable::IsReplaced(const v1::PushRequest& header) const {
  const auto found = assembling_.find(header.id().rank());
  return found != assembling_.end() && found->second->incarnation == header.id().incarnation() &&
         found->second->edition > header.edition();
}

void PushTable::Refuse(const Push& push) {
  ledger_.Record(LastOf(push, v1::ANSWER_STALE));
  Refused& refused = refused_[push.rank];
  ++refused.pushes;
  refused.samples += push.samples;
  dropped_samples_ += push.passed;
  refusals_.push_back({.rank = push.rank, .incarnation = push.incarnation, .step = push.step});
}

// All pushes of a step carry the same, where they are added up.
absl::Status PushTable::CheckContribution(const v1::PushRequest& header, const Mode& mode) const {
  const std::string who = absl::StrCat("rank ", header.id().rank(), ", step ", header.step());
  if (!v1::Contribution_IsValid(header.contribution()) || !mode.Takes(header.contribution())) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, ": --mode=", mode.name(), " takes no ", ContributionName(header.contribution())));
  }
  if (!mode.synchronous()) return absl::OkStatus();
  for (const auto* pushes : {&complete_, &assembling_}) {
    for (const auto& [rank, push] : *pushes) {
      if (rank == header.id().rank() || push->step != header.step()) continue;
      if (push->contribution == header.contribution() || push->samples == 0 || header.samples() == 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(who, ": pushes a ", ContributionName(header.contribution()),
                                                     ", but rank ", rank, " a ", ContributionName(push->contribution)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> PushTable::CheckSlice(const v1::PushRequest& header, const ReceivedSlice& slice,
                                             bool finite) const {
  const absl::StatusOr<size_t> local = layout_->LocalIndex(slice, ShardLayout::Of::kPush);
  if (!local.ok()) return local.status();
  if (header.samples() == 0) return absl::InvalidArgumentError("there are slices, but samples is 0");
  const TensorSpec& tensor = layout_->tensor(*local);
  if (!layout_->is_pushed(*local)) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice ", slice.index, " of tensor ", tensor.name, ": it is a constant, which no push carries"));
  }
  const bool gradient = tensor.kind == TensorKind::kWeight && header.contribution() == v1::CONTRIBUTION_GRADIENT;
  if (slice.payload.absent() && !gradient) {
    return absl::InvalidArgumentError(absl::StrCat("slice ", slice.index, " of tensor ", tensor.name,
                                                   " is absent, which only the gradient of a weight can be"));
  }
  if (finite) return local;
  return absl::InvalidArgumentError(absl::StrCat("the ", tensor.kind == TensorKind::kWeight ? "gradient" : "value",
                                                 " of tensor ", tensor.name, " is not finite"));
}

Admission PushTable::Admit(const v1::PushRequest& header, const Mode& mode) const {
  const uint32_t rank = header.id().rank();
  // A new owner of the rank starts where its join said, which may be further on.
  const uint64_t next = ledger_.NextStep(rank);
  const bool first = ledger_.Incarnation(rank) != header.id().incarnation();
  return mode.Admit({.rank = rank, .step = header.step(), .version = header.version(), .samples = header.samples()},
                    first ? std::max(next, header.step()) : next);
}

absl::StatusOr<std::shared_ptr<Push>> PushTable::FindOrBegin(const v1::PushRequest& header, uint64_t newest) {
  const uint32_t rank = header.id().rank();
  const std::string who = absl::StrCat("rank ", rank, ", step ", header.step());
  if (const auto earlier = complete_.find(rank); earlier != complete_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat(who, ": step ", earlier->second->step, " of this rank is still in progress"));
  }
  if (header.version() > newest) {
    return absl::InvalidArgumentError(absl::StrCat(who, ": computed on version ", header.version(), ", but shard ",
                                                   layout_->shard(), " is at version ", newest));
  }
  if (const auto found = assembling_.find(rank); found != assembling_.end()) {
    const Push& push = *found->second;
    if (push.incarnation == header.id().incarnation() && push.step == header.step() &&
        push.samples == header.samples() && push.version == header.version() &&
        push.contribution == header.contribution() && push.passed == PassedOf(header) &&
        push.learning_rate == LearningRateOf(header) && push.edition == header.edition()) {
      return found->second;
    }
    Drop(rank);  // The rank restarts this push, or begins another.
  }
  const uint64_t bytes = header.samples() == 0 ? 0 : layout_->pushed_bytes();
  if (inflight_bytes_ + bytes > max_inflight_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(who, ": shard ", layout_->shard(), " holds ", inflight_bytes_,
                                                     " bytes of gradients; with ", bytes, " more it would exceed ",
                                                     "--max_inflight_bytes=", max_inflight_bytes_));
  }
  inflight_bytes_ += bytes;
  auto push = std::make_shared<Push>(PushOf(header));
  push->slices.resize(layout_->slices());
  push->expected = layout_->pushed_slices();
  push->reserved_bytes = bytes;
  return assembling_[rank] = std::move(push);
}

const Push& PushTable::Complete(uint32_t rank) {
  auto push = assembling_.extract(rank);
  Check(!push.empty() && push.mapped()->has_all(), "a push is complete when all of its slices are here");
  return *(complete_[rank] = std::move(push.mapped()));
}

absl::Status PushTable::End(const void* session, const v1::Identity& id, uint64_t step) {
  const auto found = assembling_.find(id.rank());
  if (found == assembling_.end() || found->second->step != step || found->second->session != session) {
    return absl::OkStatus();
  }
  const absl::Status incomplete = absl::InvalidArgumentError(
      absl::StrCat("rank ", id.rank(), ", step ", step, ": only ", found->second->received, " of the ",
                   layout_->pushed_slices(), " slices of shard ", layout_->shard(), " arrived"));
  Drop(id.rank());
  return incomplete;
}

void PushTable::DropOrphans(const JobView& job, Mode& mode) {
  const auto is_orphan = [&](const auto& entry) { return !job.Owns(entry.first, entry.second->incarnation); };
  std::vector<uint32_t> orphans;
  for (const auto& entry : assembling_) {
    if (is_orphan(entry)) orphans.push_back(entry.first);
  }
  for (const uint32_t rank : orphans) Drop(rank);
  if (mode.counts_for_any_owner()) return;
  std::erase_if(complete_, [&](const auto& entry) {
    if (!is_orphan(entry)) return false;
    GiveBack(*entry.second);
    mode.Dropped(entry.first, entry.second->step);
    dropped_.push_back(entry.second);
    return true;
  });
}

bool PushTable::RefuseStale(const Mode& mode) {
  bool refused = false;
  for (auto* pushes : {&assembling_, &complete_}) {
    std::erase_if(*pushes, [&](const auto& entry) {
      const Push& push = *entry.second;
      const PushHeader header = {
          .rank = push.rank, .step = push.step, .version = push.version, .samples = push.samples};
      if (mode.Admit(header, push.step).kind != Admission::Kind::kStale) return false;
      GiveBack(push);
      Refuse(push);
      dropped_.push_back(entry.second);
      return refused = true;
    });
  }
  return refused;
}

bool PushTable::RefuseComplete(uint32_t rank, uint64_t incarnation, uint64_t step) {
  const std::shared_ptr<Push> push = FindComplete(rank, incarnation, step);
  if (push == nullptr) return false;
  complete_.erase(rank);
  GiveBack(*push);
  Refuse(*push);
  dropped_.push_back(push);
  return true;
}

void PushTable::Drop(uint32_t rank) {
  auto push = assembling_.extract(rank);
  GiveBack(*push.mapped());
  dropped_.push_back(std::move(push.mapped()));
}

// ---- From complete to answered

absl::StatusOr<Pushes> PushTable::Take(const StepSet& set) {
  for (const uint32_t rank : set.ranks) {
    const auto push = complete_.find(rank);
    if (push != complete_.end() && push->second->step == set.step) continue;
    return absl::FailedPreconditionError(absl::StrCat("step ", set.step, ": the push of rank ", rank,
                                                      " belongs to it but is missing on shard ", layout_->shard()));
  }
  Pushes pushes;
  for (const uint32_t rank : set.ranks) {
    pushes.push_back(std::move(complete_.extract(rank).mapped()));
    taken_.insert(pushes.back());
  }
  return pushes;
}

void PushTable::Record(const Push& push, v1::Answer answer) {
  ledger_.Record(LastOf(push, answer));
  Release(push);
}

void PushTable::Release(const Push& push) {
  const auto taken = std::find_if(taken_.begin(), taken_.end(),
                                  [&](const std::shared_ptr<Push>& each) { return each.get() == &push; });
  Check(taken != taken_.end(), "a push is recorded or given up once, after it was taken");
  GiveBack(push);
  taken_.erase(taken);
}

void PushTable::GiveBack(const Push& push) {
  Check(push.reserved_bytes <= inflight_bytes_, "the bytes in flight are never negative");
  inflight_bytes_ -= push.reserved_bytes;
}

// ---- What is known

v1::Answer PushTable::Tell(uint32_t rank, uint64_t step) {
  const v1::Answer answer = ledger_.Tell(rank, step);
  ++told_[answer];
  return answer;
}

bool PushTable::IsComplete(uint32_t rank, uint64_t step) const {
  const auto complete = complete_.find(rank);
  if (complete != complete_.end() && complete->second->step == step) return true;
  return std::any_of(taken_.begin(), taken_.end(),
                     [&](const std::shared_ptr<Push>& push) { return push->rank == rank && push->step == step; });
}

std::shared_ptr<Push> PushTable::Find(uint32_t rank) const {
  for (const auto* pushes : {&complete_, &assembling_}) {
    const auto found = pushes->find(rank);
    if (found != pushes->end()) return found->second;
  }
  return nullptr;
}

std::shared_ptr<Push> PushTable::FindPush(uint32_t rank, uint64_t step) const {
  for (const auto* pushes : {&complete_, &assembling_}) {
    const auto found = pushes->find(rank);
    if (found != pushes->end() && found->second->step == step) return found->second;
  }
  return nullptr;
}

std::shared_ptr<Push> PushTable::FindComplete(uint32_t rank, uint64_t incarnation, uint64_t step) const {
  const auto found = complete_.find(rank);
  const bool is_it =
      found != complete_.end() && found->second->incarnation == incarnation && found->second->step == step;
  return is_it ? found->second : nullptr;
}

Pushes PushTable::FindAll(const std::vector<uint32_t>& ranks, uint64_t step) const {
  Pushes pushes;
  for (const uint32_t rank : ranks) {
    pushes.push_back(FindPush(rank, step));
    if (pushes.back() == nullptr) return {};
  }
  return pushes;
}

std::set<uint32_t> PushTable::Begun(uint64_t step) const {
  std::set<uint32_t> begun;
  for (const auto* pushes : {&complete_, &assembling_}) {
    for (const auto& [rank, push] : *pushes) {
      if (push->step == step) begun.insert(rank);
    }
  }
  return begun;
}

std::optional<uint64_t> PushTable::NextStep(uint32_t rank, uint64_t incarnation) const {
  std::optional<uint64_t> next;
  if (ledger_.Incarnation(rank) == incarnation) next = ledger_.NextStep(rank);
  const auto count = [&](const Push& push) {
    if (push.rank == rank && push.incarnation == incarnation) next = std::max(next.value_or(0), push.step + 1);
  };
  for (const std::shared_ptr<Push>& push : taken_) count(*push);
  if (const auto complete = complete_.find(rank); complete != complete_.end()) count(*complete->second);
  return next;
}

std::map<uint32_t, PushTable::LastComplete> PushTable::LastCompletes() const {
  std::map<uint32_t, LastComplete> lasts;
  for (const Ledger::Last& last : ledger_.Lasts()) lasts[last.rank] = {last.incarnation, last.step, last.runs};
  const auto count = [&](const Push& push) {
    const auto [last, is_new] = lasts.try_emplace(push.rank, LastComplete{push.incarnation, push.step, push.runs});
    if (!is_new && push.step > last->second.step) last->second = {push.incarnation, push.step, push.runs};
  };
  for (const auto& [rank, push] : complete_) count(*push);
  for (const std::shared_ptr<Push>& push : taken_) count(*push);
  return lasts;
}

uint64_t PushTable::HighestStep() const {
  uint64_t highest = ledger_.HighestStep();
  for (const auto& [rank, push] : complete_) highest = std::max(highest, push->step + 1);
  for (const std::shared_ptr<Push>& push : taken_) highest = std::max(highest, push->step + 1);
  return highest;
}

}  // namespace ps
