#include "server/replacements.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

void Replacements::Await(const Member& lost, TimePoint now) {
  const auto before = taken_.find(lost.rank);
  awaited_[lost.rank] = {.who = absl::StrCat(lost.name, " on ", lost.host),
                         .since = before == taken_.end() ? now : before->second};
}

void Replacements::Taken(uint32_t rank) {
  const auto awaited = awaited_.find(rank);
  if (awaited == awaited_.end()) return;
  taken_[rank] = awaited->second.since;
  awaited_.erase(awaited);
}

std::optional<std::string> Replacements::Overdue(TimePoint now) const {
  for (const auto& [rank, awaited] : awaited_) {
    if (now - awaited.since <= timeout_) continue;
    return absl::StrCat("rank ", rank, " (", awaited.who, ") was lost ", FormatSeconds(now - awaited.since),
                        " ago, and no worker has taken its place (--replacement_timeout=", FormatSeconds(timeout_),
                        ")");
  }
  return std::nullopt;
}

std::string Replacements::Describe(TimePoint now) const {
  if (awaited_.empty()) return "";
  return absl::StrCat("a worker to take ",
                      absl::StrJoin(awaited_, ", and one to take ", [&](std::string* out, const auto& entry) {
                        absl::StrAppend(out, "rank ", entry.first, " (", entry.second.who, ", lost ",
                                        FormatSeconds(now - entry.second.since), " ago)");
                      }));
}

void Replacements::Extend(std::chrono::nanoseconds time, TimePoint now) {
  for (auto& [rank, awaited] : awaited_) awaited.since = std::min(awaited.since + time, now);
  for (auto& [rank, since] : taken_) since = std::min(since + time, now);
}

}  // namespace ps
