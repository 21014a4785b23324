#include "server/shard/waiters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/first_of.h"

namespace ps {
namespace {

constexpr size_t kParkedOfAMember = 8;  // It has one push and one pull, and what it gave up and sent again.

// How long an update waits for readers, and for ranks, before the chief is told.
constexpr std::chrono::seconds kBlockedLong(1);
constexpr std::chrono::seconds kStandsLong(5);
constexpr std::chrono::seconds kTellEvery(1);

}  // namespace

absl::Status Waiters::CheckRoom(const Wait& wait) const {
  const v1::Identity& id = wait.request.caller.id;
  const bool member = wait.request.caller.member();
  const size_t limit = member ? kParkedOfAMember : max_others_;
  const auto beside = std::count_if(waits_.begin(), waits_.end(), [&](const Wait& other) {
    const v1::Identity& of = other.request.caller.id;
    return of.incarnation() == id.incarnation() && (!member || of.rank() == id.rank());
  });
  if (static_cast<size_t>(beside) < limit) return absl::OkStatus();
  const std::string whose =
      member ? absl::StrCat("of rank ", id.rank()) : std::string("of callers that are not members (--max_parked)");
  return absl::ResourceExhaustedError(absl::StrCat(limit, " calls ", whose, " are waiting, its limit"));
}

std::optional<Wait> Waiters::Take(const void* session) {
  const auto found =
      std::find_if(waits_.begin(), waits_.end(), [&](const Wait& wait) { return wait.session == session; });
  if (found == waits_.end()) return std::nullopt;
  Wait wait = std::move(*found);
  waits_.erase(found);
  return wait;
}

std::vector<Wait> Waiters::TakeExpired(TimePoint now) {
  std::vector<Wait> expired;
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    const auto next = std::next(wait);
    if (wait->deadline <= now) {
      expired.push_back(std::move(*wait));
      waits_.erase(wait);
    }
    wait = next;
  }
  return expired;
}

size_t Waiters::others() const {
  return static_cast<size_t>(
      std::count_if(waits_.begin(), waits_.end(), [](const Wait& wait) { return !wait.request.caller.member(); }));
}

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
