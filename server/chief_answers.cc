// What the chief answers to calls that wait: joins, ends and requests for runs.
#include "absl/strings/str_cat.h"
#include "server/chief.h"
#include "server/job_messages.h"

namespace ps {
namespace {

absl::Status FencedError(uint32_t rank) {
  return absl::FailedPreconditionError(absl::StrCat("fenced: rank ", rank, " belongs to another worker, or was lost"));
}

}  // namespace

void Chief::AnswerJoins(TimePoint now) {
  joins_.AnswerWhere(
      [&](const auto& join) {
        mutex_.AssertHeld();
        return AnswerTo(join, now);
      },
      outbox_);
}

void Chief::AnswerDones(TimePoint now) {
  dones_.AnswerWhere(
      [&](const auto& done) {
        mutex_.AssertHeld();
        return AnswerTo(done, now);
      },
      outbox_);
}

void Chief::AnswerTakes(TimePoint now) {
  takes_.AnswerWhere(
      [&](const auto& take) {
        mutex_.AssertHeld();
        return AnswerTo(take, now);
      },
      outbox_);
  for (const JobRuns::Record& record : job_.TakeRunRecords()) {
    if (metrics_ != nullptr) metrics_->Write(record.event, record.fields);
  }
}

Chief::JoinAnswer Chief::AnswerTo(const WaitingCalls<v1::JoinReply>::Call& join, TimePoint now) {
  Member* const member = job_.Find(join.rank, join.incarnation);
  if (const absl::Status serving = job_.Serving(); !serving.ok()) {
    if (member != nullptr) job_.Dismiss(join.rank);  // This answer tells it.
    return serving;
  }
  if (member == nullptr) {
    return absl::FailedPreconditionError("the worker left, or another joined under its name");
  }
  if (job_.tells_layout() && job_.shards().Missing().empty() &&
      job_.shards().AllAcknowledge(job_.AnswersJoinFrom(join.view))) {
    job_.Begin(member, now);
    return MakeJoinReply(job_, *member);
  }
  if (join.deadline > now) return std::nullopt;
  job_.OnJoinLate(member, now);
  return absl::DeadlineExceededError("joining: " + WaitingFor(job_, now));
}

Chief::DoneAnswer Chief::AnswerTo(const WaitingCalls<v1::DoneReply>::Call& done, TimePoint now) {
  if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
  const Member* const member = job_.Find(done.rank, done.incarnation);
  if (member == nullptr) return FencedError(done.rank);
  v1::DoneReply reply;
  const bool lead = job_.IsLead(*member);
  if (job_.finishing() && finished_saving() && (lead || job_.lead_left())) {
    reply.set_all_done(true);
    reply.set_lead(lead);
    return reply;
  }
  if (done.deadline > now) return std::nullopt;
  reply.set_waiting_for(job_.finishing() && !finished_saving() ? WaitingForLastCheckpoint() : WaitingFor(job_, now));
  return reply;
}

Chief::TakeRunAnswer Chief::AnswerTo(const WaitingCalls<v1::TakeRunReply>::Call& take, TimePoint now) {
  if (const absl::Status serving = job_.Serving(); !serving.ok()) return serving;
  const Member* const member = job_.Find(take.rank, take.incarnation);
  if (member == nullptr) return FencedError(take.rank);
  const absl::StatusOr<RunDealer::Deal> deal = job_.TakeRun(*member, take.number, now);
  if (!deal.ok()) return deal.status();
  v1::TakeRunReply reply;
  switch (deal->kind) {
    case RunDealer::Deal::Kind::kRun:
      reply.set_outcome(v1::TakeRunReply::RUN);
      reply.set_run(deal->run);
      return reply;
    case RunDealer::Deal::Kind::kDone:
      reply.set_outcome(v1::TakeRunReply::DONE);
      return reply;
    case RunDealer::Deal::Kind::kWait:
      break;
  }
  // Others may be waiting for the runs that it has not finished itself.
  const bool has_open = job_.runs().dealer().HasOpen({.rank = take.rank, .incarnation = take.incarnation});
  if (!has_open && take.deadline > now) return std::nullopt;
  reply.set_outcome(v1::TakeRunReply::WAIT);
  reply.set_waiting_for(WaitingForRuns(job_, now));
  return reply;
}

}  // namespace ps
