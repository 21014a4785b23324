#include "server/chief/cut_coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"

namespace ps {

v1::Cut CutCoordinator::Begin(v1::Cut commit, bool freeze, TimePoint now, TimePoint deadline) {
  Check(idle(), "there is one cut at a time");
  ++number_;
  commit_ = std::move(commit);
  attempt_ends_ = now + attempt_;
  deadline_ = deadline;
  waited_for_.clear();
  return Enter(freeze ? v1::Cut::FREEZE : v1::Cut::COMMIT);
}

v1::Cut CutCoordinator::Enter(v1::Cut::Phase phase) {
  phase_ = phase;
  reports_.assign(num_shards_, std::nullopt);
  v1::Cut cut;
  if (phase == v1::Cut::COMMIT) cut = commit_;
  if (phase == v1::Cut::FREEZE) {
    cut.set_hold_ms(static_cast<uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(attempt_).count()));
  }
  if (phase == v1::Cut::ADVANCE) ToProto(up_to_, cut.mutable_up_to());
  cut.set_number(number_);
  cut.set_phase(phase);
  return cut;
}

CutCoordinator::Outcome CutCoordinator::OnReport(uint32_t shard, const v1::CutReport& report, TimePoint now) {
  Check(shard < num_shards_, "a report comes from a shard of this job");
  // Shards that have been frozen for longer may have gone on by themselves.
  Outcome outcome = CheckTimes(now);
  if (outcome.tell.has_value() || outcome.ended.has_value()) return outcome;
  if (idle() || report.number() != number_ || report.phase() != phase_) return outcome;
  reports_[shard] = report;
  if (std::any_of(reports_.begin(), reports_.end(), [](const auto& each) { return !each.has_value(); })) return outcome;
  if (phase_ != v1::Cut::COMMIT) {
    const bool advanced = phase_ == v1::Cut::ADVANCE;
    if (!advanced) Merge();
    outcome.tell = Enter(advanced ? v1::Cut::COMMIT : v1::Cut::ADVANCE);
    return outcome;
  }
  std::vector<uint64_t> versions;
  for (const auto& each : reports_) versions.push_back(each->version());
  phase_ = v1::Cut::UNSPECIFIED;
  outcome.ended = std::move(versions);
  return outcome;
}

void CutCoordinator::Merge() {
  steps_.clear();
  up_to_.clear();
  for (const auto& report : reports_) {
    steps_.push_back(FromProto(report->steps()));
    for (const auto& [rank, step] : steps_.back()) {
      CutStep& furthest = up_to_[rank];
      furthest = std::max(furthest, step);
    }
  }
}

CutCoordinator::Outcome CutCoordinator::CheckTimes(TimePoint now) {
  Outcome outcome;
  if (idle()) return outcome;
  const bool attempting = phase_ == v1::Cut::FREEZE || phase_ == v1::Cut::ADVANCE;
  const bool over = now >= deadline_;
  if (attempting && (over || now >= attempt_ends_)) {
    waited_for_ = WaitingFor();
    attempt_ends_ = now + kPause;
    outcome.tell = Enter(v1::Cut::CANCEL);
  }
  if (over) {
    outcome.ended = absl::DeadlineExceededError(
        phase_ == v1::Cut::COMMIT
            ? absl::StrCat("the change is made, but ", WaitingFor())
            : absl::StrCat("nothing is changed: the shards did not come to the same point, since ", waited_for_));
    phase_ = v1::Cut::UNSPECIFIED;
  } else if (!attempting && phase_ == v1::Cut::CANCEL && now >= attempt_ends_) {
    ++number_;
    attempt_ends_ = now + attempt_;
    outcome.tell = Enter(v1::Cut::FREEZE);
  }
  return outcome;
}

std::string CutCoordinator::WaitingFor() const {
  std::vector<std::string> waits;
  for (uint32_t shard = 0; shard < num_shards_; ++shard) {
    if (reports_[shard].has_value()) continue;
    std::vector<std::string> behind;
    if (phase_ == v1::Cut::ADVANCE) {
      for (const auto& [rank, step] : up_to_) {
        const auto has = steps_[shard].find(rank);
        if (has == steps_[shard].end() || has->second < step) {
          behind.push_back(absl::StrCat("step ", step.next_step - 1, " of rank ", rank));
        }
      }
    }
    waits.push_back(behind.empty() ? absl::StrCat("shard ", shard, " has not answered")
                                   : absl::StrCat("shard ", shard, " waits for ", absl::StrJoin(behind, ", ")));
  }
  return absl::StrJoin(waits, "; ");
}

}  // namespace ps
