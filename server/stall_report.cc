#include "server/stall_report.h"

#include "absl/strings/str_cat.h"
#include "server/first_of.h"

namespace ps {
namespace {

// How long an update waits for readers, and for ranks, before the chief is told.
constexpr std::chrono::seconds kBlockedLong(1);
constexpr std::chrono::seconds kStandsLong(5);
constexpr std::chrono::seconds kTellEvery(1);

}  // namespace

std::string StallReport::DescribeRanks(uint64_t step, const std::map<uint32_t, std::string>& ranks,
                                       TimePoint now) const {
  if (ranks.empty()) return "";
  const auto describe = [&](std::string* out, const auto& waited_for) {
    const auto& [rank, busy_with] = waited_for;
    const auto heard = last_heard_.find(rank);
    const std::string when = heard == last_heard_.end()
                                 ? "not heard from yet"
                                 : absl::StrCat("last heard from ", FormatSeconds(now - heard->second), " ago");
    absl::StrAppend(out, "rank ", rank, " (", busy_with, busy_with.empty() ? "" : ", ", when, ")");
  };
  return absl::StrCat("step ", step, ": waiting for ", FirstOf(ranks, describe));
}

bool StallReport::Update(const Situation& situation, TimePoint now) {
  if (!situation.step.has_value() || situation.step != step_) {
    step_ = situation.step;
    step_since_ = now;
  }
  std::string text;
  if (situation.blocked_since.has_value() && now - *situation.blocked_since > kBlockedLong) {
    text = situation.readers;
  } else if (step_.has_value() && now - step_since_ > kStandsLong) {
    text = situation.ranks;
  }
  if (text.empty() && text_.empty()) return false;
  if (!text.empty() && !text_.empty() && now - told_at_ < kTellEvery) return false;
  text_ = std::move(text);
  told_at_ = now;
  return true;
}

}  // namespace ps
