#include "server/shard/waiters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/base/first_of.h"

namespace ps {
namespace {

constexpr size_t kParkedOfAMember = 8;  // It has one push and one pull, and what it gave up and sent again.

// How long an update waits for readers, and for ranks, before the chief is told.
constexpr std::chrono::seconds kBlockedLong(1);
constexpr std::chrono::seconds kStandsLong(5);
constexpr std::chrono::seconds kTellEvery(1);

}  // namespace

Waiters::Owner Waiters::OwnerOf(const Wait& wait) {
  const Caller& caller = wait.request.caller;
  return caller.member() ? Owner(caller.id.rank(), caller.id.incarnation()) : kOthers;
}

size_t Waiters::SizeOf(const Owner& owner) const {
  const auto waits = waits_.find(owner);
  return waits == waits_.end() ? 0 : waits->second.size();
}

size_t Waiters::most(size_t members) const { return max_others_ + kParkedOfAMember * members; }

size_t Waiters::size() const {
  size_t size = 0;
  for (const auto& [owner, waits] : waits_) size += waits.size();
  return size;
}

absl::Status Waiters::CheckRoom(const Wait& wait) const {
  const bool member = wait.request.caller.member();
  const size_t limit = member ? kParkedOfAMember : max_others_;
  if (SizeOf(OwnerOf(wait)) < limit) return absl::OkStatus();
  const std::string whose = member ? absl::StrCat("of rank ", wait.request.caller.id.rank())
                                   : std::string("of callers that are not members (--max_parked)");
  return ResourceExhausted(limit, " calls ", whose, " are waiting, its limit");
}

void Waiters::Park(Wait wait) {
  const Owner owner = OwnerOf(wait);
  if (StaysAwake(wait)) awake_.insert(owner);
  earliest_ = std::min(earliest_, wait.deadline);
  for_clock_ += wait.for_clock ? 1 : 0;
  waits_[owner].push_back(std::move(wait));
}

std::vector<Wait> Waiters::TakeExpired(TimePoint now) {
  if (now < earliest_) return {};
  earliest_ = TimePoint::max();
  return TakeWhere([&](const Wait& wait) {
    if (wait.deadline <= now) return true;
    earliest_ = std::min(earliest_, wait.deadline);
    return false;
  });
}

std::vector<Wait> Waiters::TakeWhere(const std::function<bool(const Wait&)>& taken) {
  std::vector<Wait> found;
  for (auto of_owner = waits_.begin(); of_owner != waits_.end();) {
    std::list<Wait>& waits = of_owner->second;
    for (auto wait = waits.begin(); wait != waits.end();) {
      const auto next = std::next(wait);
      if (taken(*wait)) {
        for_clock_ -= wait->for_clock ? 1 : 0;
        found.push_back(std::move(*wait));
        waits.erase(wait);
      }
      wait = next;
    }
    of_owner = waits.empty() ? waits_.erase(of_owner) : std::next(of_owner);
  }
  return found;
}

void Waiters::Wake(uint32_t rank) {
  for (auto waits = waits_.lower_bound({rank, 1}); waits != waits_.end() && waits->first.first == rank; ++waits) {
    awake_.insert(waits->first);
  }
}

void Waiters::WakeAll() {
  for (const auto& [owner, waits] : waits_) awake_.insert(owner);
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
    text = situation.ranks();
  }
  if (text.empty() && text_.empty()) return false;
  if (!text.empty() && !text_.empty() && now - told_at_ < kTellEvery) return false;
  text_ = std::move(text);
  told_at_ = now;
  return true;
}

}  // namespace ps
