// The end of a job, and of a member: done, left, lost.
#include <algorithm>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/text.h"
#include "server/chief.h"

namespace ps {
namespace {

constexpr size_t kMaxReasonBytes = 512;     // That a worker gives for leaving.
constexpr size_t kMaxCancelledJoins = 256;  // That are remembered.

}  // namespace

void Chief::Done(const v1::DoneRequest& request, TimePoint now, TimePoint deadline, DoneCallback callback) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  const absl::StatusOr<Member*> member = FindMember(request.id(), now);
  if (!member.ok()) {
    outbox_.Add([callback, status = member.status()] { callback(status); });
    return;
  }
  // It asks again: nobody listens to its earlier call any more.
  const auto earlier = std::find_if(done_waits_.begin(), done_waits_.end(), [&](const DoneWait& wait) {
    return wait.rank == (*member)->rank && wait.incarnation == (*member)->incarnation;
  });
  if (earlier != done_waits_.end()) {
    outbox_.Add([callback = earlier->callback] { callback(absl::CancelledError("the worker asked again")); });
    done_waits_.erase(earlier);
  }
  done_waits_.push_back({.rank = (*member)->rank,
                         .incarnation = (*member)->incarnation,
                         .deadline = deadline,
                         .callback = std::move(callback)});
  if ((*member)->done) return AnswerDone(now);
  (*member)->done = true;
  last_progress_ = now;
  spdlog::info("{} is done", (*member)->ToString());
  ViewChanged(now);
}

absl::Status Chief::Leave(const v1::LeaveRequest& request, TimePoint now) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (request.join_request_id() != 0) {
    // A join with this join_request_id may still arrive.
    cancelled_joins_.push_back(request.join_request_id());
    if (cancelled_joins_.size() > kMaxCancelledJoins) cancelled_joins_.pop_front();
  }
  const Member* const found = request.join_request_id() != 0
                                  ? membership_.FindJoin(request.join_request_id())
                                  : membership_.Find(request.id().rank(), request.id().incarnation());
  if (phase_ == v1::PHASE_FAILED || phase_ == v1::PHASE_FINISHED) {
    // It knows how the job ended; the server need not wait for it.
    if (found != nullptr) membership_.Remove(found->rank);
    TellWatches(now);
    return absl::OkStatus();
  }
  if (request.join_request_id() == 0) PS_RETURN_IF_ERROR(FindMember(request.id(), now).status());
  if (found == nullptr) return absl::OkStatus();  // Nobody has the join_request_id.
  const Member member = *found;
  if (!member.done || !request.reason().empty()) {
    LoseMember(member, request.reason().empty() ? "left before it was done"
                                                : absl::StrCat("left: ", Printable(request.reason(), kMaxReasonBytes)));
  } else {
    spdlog::info("{} left", member.ToString());
    if (finishing_ && IsLead(member)) lead_left_ = true;
    RemoveMember(member);
    if (finishing_ && membership_.members().empty()) SetPhase(v1::PHASE_FINISHED, "");
  }
  ViewChanged(now);
  return absl::OkStatus();
}

void Chief::RemoveMember(const Member& member) {
  membership_.Remove(member.rank);
  if (phase_ != v1::PHASE_GATHERING || !membership_.members().empty() || !plan_.has_value()) return;
  // No member is left and nothing was trained: the next worker to join sets model and experiment anew.
  plan_.reset();
  experiment_.clear();
  initialiser_.reset();
  layout_view_ = view_ + 1;
  for (ShardState& shard : shards_) shard.initialised = false;
}

void Chief::LoseMember(const Member& member, const std::string& why) {
  spdlog::warn("{} {}", member.ToString(), why);
  const bool needed = phase_ == v1::PHASE_RUNNING && !member.done && mode_->OnLoss(member.rank) == LossAction::kFail;
  RemoveMember(member);
  if (phase_ != v1::PHASE_RUNNING) return;
  if (needed) {
    SetPhase(v1::PHASE_FAILED, absl::StrCat(member.ToString(), " ", why, ", at step ", member.step));
  } else if (!membership_.members().empty()) {
    return;  // A worker that is done is no longer needed; if it was the lead, the next rank becomes the lead.
  } else if (lead_left_) {
    SetPhase(v1::PHASE_FINISHED, "");
  } else {
    SetPhase(v1::PHASE_FAILED, absl::StrCat("no worker is left; the last, ", member.ToString(), ", ", why));
  }
}

std::optional<absl::StatusOr<v1::DoneReply>> Chief::DoneAnswer(const DoneWait& wait, TimePoint now) const {
  if (const absl::Status serving = Serving(); !serving.ok()) return serving;
  const auto member = membership_.members().find(wait.rank);
  if (member == membership_.members().end() || member->second.incarnation != wait.incarnation) {
    return absl::FailedPreconditionError(
        absl::StrCat("fenced: rank ", wait.rank, " belongs to another worker, or was lost"));
  }
  v1::DoneReply reply;
  const bool lead = IsLead(member->second);
  if (finishing_ && (lead || lead_left_)) {
    reply.set_all_done(true);
    reply.set_lead(lead);
  } else if (wait.deadline <= now) {
    reply.set_waiting_for(WaitingFor(now));
  } else {
    return std::nullopt;
  }
  return reply;
}

void Chief::AnswerDone(TimePoint now) {
  if (phase_ == v1::PHASE_RUNNING && membership_.all_done()) finishing_ = true;
  for (auto wait = done_waits_.begin(); wait != done_waits_.end();) {
    std::optional<absl::StatusOr<v1::DoneReply>> answer = DoneAnswer(*wait, now);
    if (!answer.has_value()) {
      ++wait;
      continue;
    }
    outbox_.Add([callback = std::move(wait->callback), answer = *std::move(answer)] { callback(answer); });
    wait = done_waits_.erase(wait);
  }
}

}  // namespace ps
