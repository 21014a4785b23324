#include "server/chief/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "server/base/first_of.h"

namespace ps {

std::string Member::ToString() const { return absl::StrCat("rank ", rank, " (", name, " on ", host, ")"); }

std::optional<uint32_t> Membership::RankForNewcomer() const {
  if (const std::vector<uint32_t> free = FreeRanks(); !free.empty()) return free.front();
  const auto suspect = std::find_if(members_.begin(), members_.end(),
                                    [](const auto& entry) { return entry.second.suspect_since.has_value(); });
  return suspect == members_.end() ? std::nullopt : std::optional<uint32_t>(suspect->first);
}

std::vector<uint32_t> Membership::FreeRanks() const {
  return NumbersWhere(max_workers_, [this](uint32_t rank) { return !members_.contains(rank); });
}

absl::StatusOr<uint32_t> Membership::RankFor(const std::string& name, std::optional<uint32_t> claim) const {
  std::optional<uint32_t> rank;
  const auto same_name =
      std::find_if(members_.begin(), members_.end(), [&](const auto& entry) { return entry.second.name == name; });
  if (same_name != members_.end()) rank = same_name->first;
  if (claim.has_value()) {
    if (*claim >= max_workers_) {
      return InvalidArgument("--rank=", *claim, ": the job's ranks are 0 to ", max_workers_ - 1, " (", flag_, "=",
                             max_workers_, ")");
    }
    if (rank.has_value() && rank != claim) {
      return absl::AlreadyExistsError(absl::StrCat("--rank=", *claim, ": the worker with this name (", name,
                                                   ") already holds rank ", *rank,
                                                   "; give this worker another --name"));
    }
    const auto holder = members_.find(*claim);
    if (holder != members_.end() && holder->second.name != name && !holder->second.suspect_since.has_value()) {
      return absl::AlreadyExistsError(
          absl::StrCat("--rank=", *claim, ": held by ", holder->second.name, " on ", holder->second.host));
    }
    rank = claim;
  }
  if (!rank.has_value()) rank = RankForNewcomer();
  if (rank.has_value()) return *rank;
  return FailedPrecondition("the job already has all of its workers (", flag_, "=", max_workers_, ")");
}

absl::StatusOr<uint32_t> Membership::RankToRejoin(const std::string& name, uint32_t former) const {
  for (const auto& [rank, member] : members_) {
    if (member.name != name) continue;
    return absl::AlreadyExistsError(
        absl::StrCat(member.ToString(), ", incarnation ", member.incarnation, ", has this worker's name now"));
  }
  const auto successor = members_.find(former);
  if (successor == members_.end() && former < max_workers_) return former;
  const std::vector<uint32_t> free = FreeRanks();
  if (!free.empty()) return free.front();
  return absl::FailedPreconditionError(
      successor == members_.end()
          ? absl::StrCat("the job already has all of its workers (", flag_, "=", max_workers_, ")")
          : absl::StrCat(successor->second.ToString(), ", incarnation ", successor->second.incarnation,
                         ", has this worker's rank now, and no other is free"));
}

Member* Membership::Hand(uint32_t rank, const std::string& name, const std::string& host, TimePoint now) {
  Member& member = members_[rank];
  if (member.incarnation > 0) Unlist(member);
  std::string replaced = member.incarnation > 0 ? absl::StrCat(member.name, " on ", member.host) : "";
  member = {.rank = rank,
            .incarnation = ++incarnations_[rank],
            .name = name,
            .host = host,
            .replaced = std::move(replaced),
            .joined = now,
            .last_heard = now};
  List(member);
  return &member;
}

void Membership::Remove(uint32_t rank) {
  const auto member = members_.find(rank);
  if (member == members_.end()) return;
  Unlist(member->second);
  members_.erase(member);
}

void Membership::List(const Member& member) {
  if (!member.done) working_[member.step].insert(member.rank);
  if (member.watch != 0) watches_[member.watch] = member.rank;
}

void Membership::Unlist(const Member& member) {
  watches_.erase(member.watch);
  const auto step = working_.find(member.step);
  if (step == working_.end()) return;
  step->second.erase(member.rank);
  if (step->second.empty()) working_.erase(step);
}

const Member* Membership::Find(uint32_t rank, uint64_t incarnation) const {
  const auto member = members_.find(rank);
  return member != members_.end() && member->second.incarnation == incarnation ? &member->second : nullptr;
}

Member* Membership::Find(uint32_t rank, uint64_t incarnation) {
  return const_cast<Member*>(std::as_const(*this).Find(rank, incarnation));  // This object is not const.
}

const Member* Membership::FindJoin(uint64_t join_request_id) const {
  const auto member = std::find_if(members_.begin(), members_.end(), [&](const auto& entry) {
    return join_request_id != 0 && entry.second.join_request_id == join_request_id;
  });
  return member == members_.end() ? nullptr : &member->second;
}

const Member* Membership::FindName(const std::string& name) const {
  const auto member =
      std::find_if(members_.begin(), members_.end(), [&](const auto& entry) { return entry.second.name == name; });
  return member == members_.end() ? nullptr : &member->second;
}

Member* Membership::At(uint32_t rank) {
  const auto member = members_.find(rank);
  return member == members_.end() ? nullptr : &member->second;
}

std::string Membership::List() const {
  if (members_.empty()) return "none";
  constexpr size_t kMost = 20;  // A message names no more.
  std::vector<std::string> names;
  for (const auto& [rank, member] : members_) {
    if (names.size() == kMost) {
      names.push_back(absl::StrCat("and ", members_.size() - kMost, " more"));
      break;
    }
    names.push_back(member.ToString());
  }
  return absl::StrJoin(names, ", ");
}

const Member* Membership::FindWatch(uint64_t watch) const {
  const auto rank = watches_.find(watch);
  return rank == watches_.end() ? nullptr : &members_.at(rank->second);
}

std::vector<Member> Membership::Lost(TimePoint now, std::chrono::nanoseconds reconnect_grace) const {
  std::vector<Member> lost;
  for (const auto& [rank, member] : members_) {
    const bool gone = member.suspect_since.has_value() && now - *member.suspect_since > reconnect_grace;
    if (gone || now - member.last_heard > lease_) lost.push_back(member);
  }
  return lost;
}

void Membership::SuspectSilent(TimePoint now) {
  for (auto& [rank, member] : members_) {
    if (!member.watch_due.has_value() || now < *member.watch_due) continue;
    member.suspect_since = *std::exchange(member.watch_due, std::nullopt);
  }
}

void Membership::Extend(std::chrono::nanoseconds time, TimePoint now) {
  for (auto& [rank, member] : members_) {
    member.last_heard = std::min(member.last_heard + time, now);
    if (member.watch_due.has_value()) *member.watch_due += time;
    if (member.suspect_since.has_value()) member.suspect_since = std::min(*member.suspect_since + time, now);
  }
}

const std::set<uint32_t>& Membership::LowestStep() const {
  static const std::set<uint32_t> none;
  return working_.empty() ? none : working_.begin()->second;
}

std::string Membership::Describe(const std::set<uint32_t>& ranks, TimePoint now) const {
  return FirstOf(ranks, [&](std::string* out, uint32_t rank) {
    const auto member = members_.find(rank);
    if (member == members_.end()) {
      absl::StrAppend(out, "rank ", rank, " (not joined)");
    } else {
      absl::StrAppend(out, "rank ", rank, " (last heard from ", FormatSeconds(now - member->second.last_heard),
                      " ago)");
    }
  });
}

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
