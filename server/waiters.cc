#include "server/waiters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ps {
namespace {

constexpr size_t kParkedOfAMember = 8;  // It has one push and one pull, and what it gave up and sent again.

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

}  // namespace ps
