#include "server/shard/push_table.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/proto_values.h"
#include "common/status.h"

namespace ps {
namespace {

Ledger::Last LastOf(const Push& push, v1::Answer answer) {
  return {.rank = push.rank, .incarnation = push.incarnation, .step = push.step, .answer = answer, .runs = push.runs};
}

constexpr uint64_t kMaxPassed = uint64_t{1} << 40;  // Samples, of a push.

std::string ContributionName(v1::Contribution contribution) {
  if (contribution == v1::CONTRIBUTION_GRADIENT) return "gradient";
  if (contribution == v1::CONTRIBUTION_WEIGHT_DIFFERENCE) return "difference of weights";
  return absl::StrCat("contribution ", int{contribution});
}

uint64_t PassedOf(const v1::PushRequest& header) { return header.has_passed() ? header.passed() : header.samples(); }

std::optional<float> LearningRateOf(const v1::PushRequest& header) {
  return header.has_learning_rate() ? std::optional<float>(header.learning_rate()) : std::nullopt;
}

ToldGroups GroupsOf(const v1::PushRequest& header) {
  if (header.groups().empty()) return nullptr;
  return std::make_shared<const GroupValues>(FromProto(header.groups()));
}

bool TellsGroups(const v1::PushRequest& header, const ToldGroups& groups) {
  if (header.groups().empty() || groups == nullptr) return header.groups().empty() && groups == nullptr;
  return FromProto(header.groups()) == *groups;
}

std::string Who(const v1::PushRequest& header) {
  return absl::StrCat("rank ", header.id().rank(), ", step ", header.step());
}

absl::Status CheckNumbers(const v1::PushRequest& header) {
  if (PassedOf(header) > kMaxPassed) {
    return InvalidArgument(Who(header), ": passed is ", header.passed(), " samples; at most ", kMaxPassed,
                           " are supported");
  }
  const float rate = header.learning_rate();
  if (std::isfinite(rate) && rate >= 0) return absl::OkStatus();
  return InvalidArgument(Who(header), ": learning_rate=", rate, ": expected a number of 0 or more");
}

// An empty contribution carries nothing.
SliceRanges Carried(const v1::PushRequest& header) { return header.samples() == 0 ? SliceRanges() : CarriesOf(header); }

// They ascend, are apart, and are slices of the model.
absl::Status CheckCarries(const SliceRanges& ranges, size_t slices) {
  if (ranges.size() > kMaxRanges) {
    return InvalidArgument("it carries ", ranges.size(), " ranges of slices; at most ", kMaxRanges, " are supported");
  }
  uint32_t from = 0;
  for (const SliceRange& range : ranges) {
    if (range.begin < from || range.begin >= range.end || range.end > slices) {
      return InvalidArgument("it carries slices ", range.begin, " to before ", range.end,
                             ", which do not follow those before, or are none of the model's ", slices);
    }
    from = range.end + 1;
  }
  return absl::OkStatus();
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
  push.told = {.learning_rate = LearningRateOf(header), .groups = GroupsOf(header)};
  push.carries = Carried(header);
  return push;
}

}  // namespace

void PushTable::SetLayout(std::shared_ptr<const ShardLayout> layout, uint64_t max_inflight_bytes) {
  Check(pushes_.empty() && taken_.empty(), "no push is in progress when the layout changes");
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
    if (Assembling(rank) != nullptr) Drop(rank);
    Refuse(PushOf(header));
    return Arrival();
  }
  PS_ASSIGN_OR_RETURN(const std::shared_ptr<Push> found, FindOrBegin(header, mode, newest));
  Arrival arrival = {.push = found, .slices = {}};
  Push& push = *found;
  push.session = session;
  for (size_t i = 0; i < slices.size(); ++i) {
    ReceivedSlice& slice = slices[i];
    const absl::StatusOr<size_t> local = CheckSlice(header, push, slice, /*finite=*/not_finite != i);
    if (!local.ok()) {
      Drop(rank);
      return Annotate(local.status(), Who(header));
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
  const Push* const push = Assembling(header.id().rank());
  return push != nullptr && push->incarnation == header.id().incarnation() && push->edition > header.edition();
}

void PushTable::Refuse(const Push& push) {
  // Its runs are not used: they go by the push before it.
  Ledger::Last last = LastOf(push, v1::ANSWER_STALE);
  const Ledger::Last* const before = ledger_.Find(push.rank);
  last.runs = before != nullptr && before->incarnation == push.incarnation ? before->runs : 0;
  ledger_.Record(last);
  Refused& refused = refused_[push.rank];
  ++refused.pushes;
  refused.samples += push.samples;
  dropped_samples_ += push.passed;
  answered_.push_back(push.rank);
  left_.erase(push.rank);
  refusals_.push_back({.rank = push.rank, .incarnation = push.incarnation, .step = push.step});
}

// Pushes that are added up carry the same.
absl::Status PushTable::CheckContribution(const v1::PushRequest& header, const Mode& mode) const {
  if (!v1::Contribution_IsValid(header.contribution()) || !mode.Takes(header.contribution())) {
    return InvalidArgument(Who(header), ": --mode=", mode.name(), " takes no ",
                           ContributionName(header.contribution()));
  }
  PS_RETURN_IF_ERROR(Annotate(CheckCarries(Carried(header), layout_->plan().slices().size()), Who(header)));
  const std::optional<uint64_t> as = mode.AddedUpAs(header.step());
  const auto carriers = as.has_value() ? carriers_.find(*as) : carriers_.end();
  if (header.samples() == 0 || carriers == carriers_.end()) return absl::OkStatus();
  for (const uint32_t rank : carriers->second[header.contribution()]) {
    if (rank == header.id().rank()) continue;
    if (pushes_.at(rank)->carries == Carried(header)) break;  // As do all others.
    return InvalidArgument(Who(header), ": carries other slices of the model than the push of rank ", rank);
  }
  for (int other = 0; other < v1::Contribution_ARRAYSIZE; ++other) {
    if (other == header.contribution()) continue;
    for (const uint32_t rank : carriers->second[static_cast<size_t>(other)]) {
      if (rank == header.id().rank()) continue;  // It may push another in its own place.
      return InvalidArgument(Who(header), ": pushes a ", ContributionName(header.contribution()), ", but rank ", rank,
                             " a ", ContributionName(static_cast<v1::Contribution>(other)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> PushTable::CheckSlice(const v1::PushRequest& header, const Push& push,
                                             const ReceivedSlice& slice, bool finite) const {
  PS_ASSIGN_OR_RETURN(const size_t local, layout_->LocalIndex(slice, ShardLayout::Of::kPush));
  if (header.samples() == 0) return absl::InvalidArgumentError("there are slices, but samples is 0");
  const TensorSpec& tensor = layout_->tensor(local);
  const auto wrong = [&](const char* what) {
    return InvalidArgument("slice ", slice.index, " of tensor ", tensor.name, what);
  };
  if (!layout_->is_pushed(local)) return wrong(": it is a constant, which no push carries");
  if (push.leaves_out(local)) return wrong(" came, but the push says that it does not carry it");
  const bool gradient = tensor.kind == TensorKind::kWeight && header.contribution() == v1::CONTRIBUTION_GRADIENT;
  if (slice.payload.absent() && !gradient) return wrong(" is absent, which only the gradient of a weight can be");
  if (finite) return local;
  const char* const what = tensor.kind != TensorKind::kWeight                            ? "value"
                           : header.contribution() == v1::CONTRIBUTION_WEIGHT_DIFFERENCE ? "difference"
                                                                                         : "gradient";
  return InvalidArgument("the ", what, " of tensor ", tensor.name, " is not finite");
}

Admission PushTable::Admit(const v1::PushRequest& header, const Mode& mode) const {
  const uint32_t rank = header.id().rank();
  // A new owner of the rank starts where its join said, which may be further on.
  const uint64_t next = ledger_.NextStep(rank);
  const bool first = ledger_.Incarnation(rank) != header.id().incarnation();
  return mode.Admit({.rank = rank, .step = header.step(), .version = header.version(), .samples = header.samples()},
                    first ? std::max(next, header.step()) : next);
}

absl::StatusOr<std::shared_ptr<Push>> PushTable::FindOrBegin(const v1::PushRequest& header, const Mode& mode,
                                                             uint64_t newest) {
  const uint32_t rank = header.id().rank();
  const std::shared_ptr<Push> found = Find(rank);
  if (found != nullptr && found->complete) {
    return FailedPrecondition(Who(header), ": step ", found->step, " of this rank is still in progress");
  }
  if (header.version() > newest) {
    return InvalidArgument(Who(header), ": computed on version ", header.version(), ", but shard ", layout_->shard(),
                           " is at version ", newest);
  }
  if (found != nullptr) {
    const Push& push = *found;
    if (push.incarnation == header.id().incarnation() && push.step == header.step() &&
        push.samples == header.samples() && push.version == header.version() &&
        push.contribution == header.contribution() && push.passed == PassedOf(header) &&
        push.told.learning_rate == LearningRateOf(header) && TellsGroups(header, push.told.groups) &&
        push.edition == header.edition() && push.carries == Carried(header)) {
      return found;
    }
    const bool same_push = push.incarnation == header.id().incarnation() && push.step == header.step() &&
                           push.edition == header.edition() && header.edition() > 0;
    if (same_push && push.carries != Carried(header)) {
      return InvalidArgument(Who(header), ": a call carries other slices than another call of the same push");
    }
    Drop(rank);  // The rank restarts this push, or begins another.
  }
  auto push = std::make_shared<Push>(PushOf(header));
  push->added_up_as = mode.AddedUpAs(push->step);
  push->slices.resize(layout_->slices());
  push->expected = layout_->pushed_slices();
  uint64_t bytes = header.samples() == 0 ? 0 : layout_->pushed_bytes();
  if (!push->carries.empty()) {
    push->left_out.resize(layout_->slices());
    for (size_t local = 0; local < layout_->slices(); ++local) {
      if (!layout_->is_pushed(local) || Contain(push->carries, layout_->slice(local).index)) continue;
      push->left_out[local] = true;
      push->slices[local].set_absent();
      ++push->absent;
      --push->expected;
      bytes -= layout_->pushed_bytes(local);
    }
  }
  if (inflight_bytes_ + bytes > max_inflight_bytes_) {
    return ResourceExhausted(Who(header), ": shard ", layout_->shard(), " holds ", inflight_bytes_,
                             " bytes of gradients; with ", bytes, " more it would exceed ",
                             "--max_inflight_bytes=", max_inflight_bytes_);
  }
  inflight_bytes_ += bytes;
  push->reserved_bytes = bytes;
  Enter(push);
  return push;
}

Push& PushTable::Complete(uint32_t rank) {
  Push& push = *pushes_.at(rank);
  Check(!push.complete && push.has_all(), "a push is complete when all of its slices are here");
  push.complete = true;
  ++steps_.at(push.step).complete;
  left_.erase(rank);
  return push;
}

absl::Status PushTable::End(const void* session, const v1::Identity& id, uint64_t step) {
  const Push* const push = Assembling(id.rank());
  if (push == nullptr || push->step != step || push->session != session) return absl::OkStatus();
  const absl::Status incomplete =
      InvalidArgument("rank ", id.rank(), ", step ", step, ": only ", push->received, " of the ", push->expected,
                      " slices of shard ", layout_->shard(), " arrived");
  Drop(id.rank());
  return incomplete;
}

void PushTable::DropOrphans(const JobView& job, Mode& mode) {
  std::vector<uint32_t> orphans;
  for (const auto& [rank, push] : pushes_) {
    const bool counts = push->complete && mode.counts_for_any_owner();
    if (!counts && !job.Owns(rank, push->incarnation)) orphans.push_back(rank);
  }
  for (const uint32_t rank : orphans) {
    const std::shared_ptr<Push> push = Drop(rank);
    if (push->complete) mode.Dropped(rank, push->step);
  }
  left_.clear();
  const auto look_at = [&](uint32_t rank) {
    if (!job.Owns(rank, Last(rank)->incarnation)) left_.insert(rank);
  };
  for (const Ledger::Last& last : ledger_.Lasts()) look_at(last.rank);
  for (const auto& [key, push] : taken_) look_at(push->rank);
}

bool PushTable::RefuseStale(const Mode& mode) {
  const Mode::Oldest oldest = mode.oldest();
  std::set<uint32_t> stale;
  for (auto step = steps_.begin(); step != steps_.end() && step->first < oldest.step; ++step) {
    stale.insert(step->second.begun.begin(), step->second.begun.end());
  }
  for (auto push = by_version_.begin(); push != by_version_.end() && push->first < oldest.version; ++push) {
    stale.insert(push->second);
  }
  for (const uint32_t rank : stale) Refuse(*Drop(rank));
  return !stale.empty();
}

bool PushTable::RefuseComplete(uint32_t rank, uint64_t incarnation, uint64_t step) {
  if (FindComplete(rank, incarnation, step) == nullptr) return false;
  Refuse(*Drop(rank));
  return true;
}

void PushTable::Enter(const std::shared_ptr<Push>& push) {
  pushes_[push->rank] = push;
  by_version_.insert({push->version, push->rank});
  Step& step = steps_[push->step];
  step.begun.insert(push->rank);
  if (push->samples > 0 && push->added_up_as.has_value()) {
    carriers_[*push->added_up_as][push->contribution].insert(push->rank);
  }
}

std::shared_ptr<Push> PushTable::Remove(uint32_t rank) {
  std::shared_ptr<Push> push = std::move(pushes_.extract(rank).mapped());
  by_version_.erase({push->version, rank});
  const auto step = steps_.find(push->step);
  step->second.begun.erase(rank);
  if (push->samples > 0 && push->added_up_as.has_value()) {
    const auto carriers = carriers_.find(*push->added_up_as);
    carriers->second[push->contribution].erase(rank);
    const auto none = [](const std::set<uint32_t>& ranks) { return ranks.empty(); };
    if (std::all_of(carriers->second.begin(), carriers->second.end(), none)) carriers_.erase(carriers);
  }
  if (push->complete) --step->second.complete;
  if (step->second.begun.empty() && step->second.taken == 0) steps_.erase(step);
  return push;
}

std::shared_ptr<Push> PushTable::Drop(uint32_t rank) {
  GiveBack(*pushes_.at(rank));
  return dropped_.emplace_back(Remove(rank));
}

// ---- From complete to answered

absl::StatusOr<Pushes> PushTable::Take(const StepSet& set) {
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    const uint32_t rank = set.ranks[i];
    const std::shared_ptr<Push> push = Find(rank);
    if (push != nullptr && push->complete && push->step == set.step_of(i)) continue;
    return FailedPrecondition("step ", set.step_of(i), ": the push of rank ", rank,
                              " belongs to it but is missing on shard ", layout_->shard());
  }
  Pushes pushes;
  for (size_t i = 0; i < set.ranks.size(); ++i) {
    taken_[{set.ranks[i], set.step_of(i)}] = pushes.emplace_back(Remove(set.ranks[i]));
    ++steps_[set.step_of(i)].taken;
  }
  return pushes;
}

void PushTable::Record(const Push& push, v1::Answer answer) {
  ledger_.Record(LastOf(push, answer));
  Release(push);
}

void PushTable::Release(const Push& push) {
  Check(taken_.contains({push.rank, push.step}), "a push is recorded or given up once, after it was taken");
  answered_.push_back(push.rank);
  GiveBack(push);
  const auto step = steps_.find(push.step);
  if (--step->second.taken == 0 && step->second.begun.empty()) steps_.erase(step);
  const uint32_t rank = push.rank;
  const uint64_t incarnation = push.incarnation;
  taken_.erase({rank, push.step});
  if (const std::optional<Ledger::Last> last = Last(rank); last.has_value() && last->incarnation < incarnation) {
    left_.insert(rank);
  }
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
  const auto push = pushes_.find(rank);
  const bool complete = push != pushes_.end() && push->second->complete && push->second->step == step;
  return complete || taken_.contains({rank, step});
}

bool PushTable::HasComplete(uint32_t rank) const {
  const auto push = pushes_.find(rank);
  return push != pushes_.end() && push->second->complete;
}

size_t PushTable::complete(uint64_t step) const {
  const auto found = steps_.find(step);
  return found == steps_.end() ? 0 : found->second.complete;
}

const Push* PushTable::Assembling(uint32_t rank) const {
  const auto push = pushes_.find(rank);
  return push == pushes_.end() || push->second->complete ? nullptr : push->second.get();
}

std::shared_ptr<Push> PushTable::Find(uint32_t rank) const {
  const auto push = pushes_.find(rank);
  return push == pushes_.end() ? nullptr : push->second;
}

std::shared_ptr<Push> PushTable::FindComplete(uint32_t rank, uint64_t incarnation, uint64_t step) const {
  std::shared_ptr<Push> push = Find(rank);
  const bool is_it = push != nullptr && push->complete && push->incarnation == incarnation && push->step == step;
  return is_it ? push : nullptr;
}

Pushes PushTable::FindAll(const std::vector<uint32_t>& ranks, uint64_t step) const {
  Pushes pushes;
  for (const uint32_t rank : ranks) {
    pushes.push_back(Find(rank));
    if (pushes.back() == nullptr || pushes.back()->step != step) return {};
  }
  return pushes;
}

const std::set<uint32_t>& PushTable::Begun(uint64_t step) const {
  static const std::set<uint32_t> none;
  const auto found = steps_.find(step);
  return found == steps_.end() ? none : found->second.begun;
}

std::optional<Ledger::Last> PushTable::Last(uint32_t rank) const {
  const Ledger::Last* const answered = ledger_.Find(rank);
  std::optional<Ledger::Last> last = answered == nullptr ? std::nullopt : std::optional<Ledger::Last>(*answered);
  const auto count = [&](const Push& push) {
    const bool later =
        !last.has_value() || std::tie(last->incarnation, last->step) < std::tie(push.incarnation, push.step);
    if (later) last = LastOf(push, v1::ANSWER_UNSPECIFIED);
  };
  for (auto push = taken_.lower_bound({rank, 0}); push != taken_.end() && push->first.first == rank; ++push) {
    count(*push->second);
  }
  if (const auto push = pushes_.find(rank); push != pushes_.end() && push->second->complete) count(*push->second);
  return last;
}

uint64_t PushTable::HighestStep() const {
  const uint64_t answered = ledger_.HighestStep();
  for (auto step = steps_.rbegin(); step != steps_.rend() && step->first >= answered; ++step) {
    if (step->second.complete + step->second.taken > 0) return step->first + 1;
  }
  return answered;
}

}  // namespace ps
