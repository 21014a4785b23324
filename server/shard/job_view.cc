#include "server/shard/job_view.h"

#include <utility>

#include "common/status.h"

namespace ps {

bool JobView::Accept(const v1::View& view) {
  if (view.number() <= view_.number()) return false;
  v1::View next = view;
  next.clear_members();
  if (view.since() == 0) {
    members_.clear();
  } else {
    if (view_.has_layout()) next.mutable_layout()->Swap(view_.mutable_layout());
    if (view_.has_optimizer()) next.mutable_optimizer()->Swap(view_.mutable_optimizer());
    if (view_.has_restore()) next.mutable_restore()->Swap(view_.mutable_restore());
  }
  view_ = std::move(next);
  for (const uint32_t rank : view.left()) members_.erase(rank);
  for (const v1::Member& member : view.members()) {
    members_[member.rank()] = member;
    done_.erase(member.rank());
    if (member.done()) done_[member.rank()] = member.name();
  }
  return true;
}

bool JobView::Fail(const std::string& reason) {
  if (!failure_.empty()) return false;
  failure_ = reason;
  return true;
}

void JobView::Shutdown(const absl::Status& status) {
  if (shutdown_.ok()) shutdown_ = status;
}

absl::Status JobView::Failed() const {
  if (view_.phase() == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + view_.failure());
  if (view_.phase() == v1::PHASE_SHUT_DOWN) return JobShutDown();
  return failure_.empty() ? absl::OkStatus() : absl::AbortedError("the job failed: " + failure_);
}

absl::Status JobView::Serving() const {
  if (!shutdown_.ok()) return shutdown_;
  PS_RETURN_IF_ERROR(Failed());
  if (finished()) return JobFinished();
  if (chief_lost_) return Unavailable("shard ", shard_, " has lost its connection to the chief");
  return absl::OkStatus();
}

absl::Status JobView::ServingReads(bool member, bool readable) const {
  if (!shutdown_.ok()) return shutdown_;
  if (finished()) return absl::OkStatus();
  if (const absl::Status failed = Failed(); !failed.ok()) return member || !readable ? failed : absl::OkStatus();
  return Serving();
}

bool JobView::IsMember(const v1::Identity& id) const {
  return id.job() == job_ && id.generation() == view_.generation() && Owns(id.rank(), id.incarnation());
}

bool JobView::Owns(uint32_t rank, uint64_t incarnation) const {
  const auto member = members_.find(rank);
  return member != members_.end() && member->second.incarnation() == incarnation;
}

std::string JobView::BusyWith(uint32_t rank) const {
  const auto member = members_.find(rank);
  return member == members_.end() ? "" : member->second.busy_with();
}

ModeMembers JobView::mode_members() const {
  ModeMembers members;
  for (const auto& [rank, member] : members_) {
    members[rank] = {
        .incarnation = member.incarnation(), .done = member.done(), .counts_as_empty = member.counts_as_empty()};
  }
  return members;
}

std::optional<uint32_t> JobView::lowest_rank() const {
  for (const auto& [rank, member] : members_) {
    if (!member.done()) return rank;
  }
  return std::nullopt;
}

std::map<uint32_t, uint64_t> JobView::MemberIncarnations() const {
  std::map<uint32_t, uint64_t> incarnations;
  for (const auto& [rank, member] : members_) incarnations[rank] = member.incarnation();
  return incarnations;
}

}  // namespace ps
