#include "server/job_state.h"

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {

bool JobState::Accept(const v1::View& view) {
  if (view.number() <= view_.number()) return false;
  view_ = view;
  members_.clear();
  for (const v1::Member& member : view.members()) {
    members_[member.rank()] = member;
    done_.erase(member.rank());
    if (member.done()) done_[member.rank()] = member.name();
  }
  return true;
}

bool JobState::Fail(const std::string& reason) {
  if (!failure_.empty()) return false;
  failure_ = reason;
  return true;
}

void JobState::Shutdown(const absl::Status& status) {
  if (shutdown_.ok()) shutdown_ = status;
}

absl::Status JobState::Failed() const {
  if (view_.phase() == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + view_.failure());
  return failure_.empty() ? absl::OkStatus() : absl::AbortedError("the job failed: " + failure_);
}

absl::Status JobState::Serving() const {
  if (!shutdown_.ok()) return shutdown_;
  PS_RETURN_IF_ERROR(Failed());
  if (finished()) return absl::FailedPreconditionError("the job is finished");
  if (chief_lost_) {
    return absl::UnavailableError(absl::StrCat("shard ", shard_, " has not heard from the chief for too long"));
  }
  return absl::OkStatus();
}

absl::Status JobState::ServingReads(bool member, bool readable) const {
  if (!shutdown_.ok()) return shutdown_;
  if (finished()) return absl::OkStatus();
  if (const absl::Status failed = Failed(); !failed.ok()) return member || !readable ? failed : absl::OkStatus();
  return Serving();
}

bool JobState::IsMember(const v1::Identity& id) const {
  return id.job() == job_ && id.generation() == view_.generation() && Owns(id.rank(), id.incarnation());
}

bool JobState::Owns(uint32_t rank, uint64_t incarnation) const {
  const auto member = members_.find(rank);
  return member != members_.end() && member->second.incarnation() == incarnation;
}

bool JobState::IsInitialiser(const v1::Identity& id) const {
  return IsMember(id) && members_.at(id.rank()).initialiser();
}

std::set<uint32_t> JobState::done_ranks() const {
  std::set<uint32_t> ranks;
  for (const auto& [rank, name] : done_) ranks.insert(rank);
  return ranks;
}

std::set<uint32_t> JobState::member_ranks() const {
  std::set<uint32_t> ranks;
  for (const auto& [rank, member] : members_) ranks.insert(rank);
  return ranks;
}

std::map<uint32_t, uint64_t> JobState::MemberIncarnations() const {
  std::map<uint32_t, uint64_t> incarnations;
  for (const auto& [rank, member] : members_) incarnations[rank] = member.incarnation();
  return incarnations;
}

}  // namespace ps
