#include "server/membership.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

std::string Member::ToString() const { return absl::StrCat("rank ", rank, " (", name, " on ", host, ")"); }

std::optional<uint32_t> Membership::LowestFreeRank() const {
  for (uint32_t rank = 0; rank < num_workers_; ++rank) {
    if (!members_.contains(rank)) return rank;
  }
  return std::nullopt;
}

absl::StatusOr<Member*> Membership::Join(const std::string& name, std::optional<uint32_t> claim,
                                         const std::string& host, TimePoint now) {
  std::optional<uint32_t> rank;
  const auto same_name =
      std::find_if(members_.begin(), members_.end(), [&](const auto& entry) { return entry.second.name == name; });
  if (same_name != members_.end()) rank = same_name->first;
  if (claim.has_value()) {
    if (*claim >= num_workers_) {
      return absl::InvalidArgumentError(absl::StrCat("--rank=", *claim, ": the job has the ranks 0 to ",
                                                     num_workers_ - 1, " (--num_workers=", num_workers_, ")"));
    }
    const auto holder = members_.find(*claim);
    if (holder != members_.end() && holder->second.name != name) {
      return absl::AlreadyExistsError(
          absl::StrCat("--rank=", *claim, ": held by ", holder->second.name, " on ", holder->second.host));
    }
    if (rank.has_value() && rank != claim) members_.erase(*rank);
    rank = claim;
  }
  if (!rank.has_value()) rank = LowestFreeRank();
  if (!rank.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job has all of its workers already (--num_workers=", num_workers_, ")"));
  }
  Member& member = members_[*rank];
  member = {.rank = *rank, .incarnation = ++incarnations_[*rank], .name = name, .host = host, .last_heard = now};
  return &member;
}

Member* Membership::Find(uint32_t rank, uint64_t incarnation) {
  const auto member = members_.find(rank);
  return member != members_.end() && member->second.incarnation == incarnation ? &member->second : nullptr;
}

Member* Membership::FindTicket(uint64_t ticket) {
  const auto member = std::find_if(members_.begin(), members_.end(),
                                   [&](const auto& entry) { return ticket != 0 && entry.second.ticket == ticket; });
  return member == members_.end() ? nullptr : &member->second;
}

std::vector<Member> Membership::Expired(TimePoint now) const {
  std::vector<Member> expired;
  for (const auto& [rank, member] : members_) {
    if (now - member.last_heard > lease_) expired.push_back(member);
  }
  return expired;
}

bool Membership::all_done() const {
  return !members_.empty() &&
         std::all_of(members_.begin(), members_.end(), [](const auto& entry) { return entry.second.done; });
}

std::string Membership::Describe(const std::vector<uint32_t>& ranks, TimePoint now) const {
  return absl::StrJoin(ranks, ", ", [&](std::string* out, uint32_t rank) {
    const auto member = members_.find(rank);
    if (member == members_.end()) {
      absl::StrAppend(out, "rank ", rank, " (not joined)");
    } else {
      absl::StrAppend(out, "rank ", rank, " (last heard of ", FormatSeconds(now - member->second.last_heard), " ago)");
    }
  });
}

}  // namespace ps
