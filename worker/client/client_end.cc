// What a client asks its chief, and how it ends: it leaves, fails, or was rolled back.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "worker/client/client_impl.h"
#include "worker/client/fencing.h"
#include "worker/client/weights_hash.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kAnswerMargin(5000);  // For the answer of a call that waits at the chief.

}  // namespace

void ClientImpl::OnGeneration(uint64_t running) {
  const std::string what =
      absl::StrCat("generation ", running, " of job ", options_.job, " is running, not generation ", generation());
  if (!recovers()) return Fail(absl::FailedPreconditionError("fenced: " + what));
  Fail(absl::FailedPreconditionError(absl::StrCat(
           "rank ", rank(), ": the job was rolled back to an earlier checkpoint (", what, "); make a new client")),
       /*rolled_back=*/true);
}

// Called by an exchange, which must not be ended here.
void ClientImpl::OnFenced(uint64_t running) {
  if (running > generation()) {
    timer_.At(timer_.now(), [this, running] { OnGeneration(running); });
  } else {
    heartbeats_->BeatNow();
  }
}

void ClientImpl::OnRefused(const absl::Status& status) {
  if (IsFenced(status) && !left_) fenced_ = true;
  Fail(status);
}

void ClientImpl::Fail(const absl::Status& failure, bool rolled_back) {
  {
    MutexLock lock(mutex_);
    if ((left_ && !rolled_back) || !failure_.ok()) return;
    failure_ = failure;
    rolled_back_ = rolled_back;
  }
  exchanges_.Fail(failure);
  if (rolled_back) over_.request_stop();
}

absl::Status ClientImpl::Ended(const absl::Status& status) {
  MutexLock lock(mutex_);
  return !status.ok() && rolled_back_ ? failure_ : status;
}

absl::Status ClientImpl::AskChief(ChiefCalls::Wait wait, const ChiefCalls::Call& call) {
  wait.stop = over_.get_token();
  const absl::Status status = chief_.UntilAnswered(wait, call);
  if (IsFenced(status)) AskWhyFenced();
  return Ended(status);
}

void ClientImpl::AskWhyFenced() {
  if (rolled_back_ || fenced_) return;
  v1::HeartbeatRequest request;
  *request.mutable_id() = joined_as_.id();
  v1::HeartbeatReply state;
  const absl::Status answered = chief_.UntilAnswered(
      {.what = "asking which generation runs", .call_time = kControlCallTime, .stop = over_.get_token()},
      [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
        return FromGrpc(chief.Heartbeat(&context, request, &state));
      });
  if (IsFenced(answered)) return OnRefused(answered);
  if (answered.ok() && state.generation() != 0) OnGeneration(state.generation());
}

absl::StatusOr<TakenRun> ClientImpl::TakeRun(const RunRequest& request) {
  const TimePoint wait_end = request.wait == absl::InfiniteDuration() ? TimePoint::max() : After(request.wait);
  v1::TakeRunRequest asked;
  *asked.mutable_id() = joined_as_.id();
  asked.set_number(request.number);
  asked.set_finished(request.finished);
  asked.set_samples(request.samples);
  asked.set_batch_size(request.batch_size);
  asked.set_runs(request.runs);
  for (;;) {
    const auto left = std::max<std::chrono::nanoseconds>(wait_end - Now(), {});
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::min(left, ToChrono(options_.notice_every)));
    asked.set_wait_ms(static_cast<uint32_t>(wait.count()));
    v1::TakeRunReply reply;
    PS_RETURN_IF_ERROR(AskChief({.what = "taking a run of samples", .call_time = wait + kAnswerMargin},
                                [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
                                  return FromGrpc(chief.TakeRun(&context, asked, &reply));
                                }));
    if (reply.outcome() == v1::TakeRunReply::RUN) {
      taken_runs_ = request.number;
      return TakenRun{.outcome = TakenRun::Outcome::kRun, .run = reply.run()};
    }
    if (reply.outcome() == v1::TakeRunReply::DONE) return TakenRun{.outcome = TakenRun::Outcome::kDone};
    const bool has_open = request.finished + 1 < request.number;
    if (has_open || Now() >= wait_end) return TakenRun{.outcome = TakenRun::Outcome::kWait};
    Notice(reply.waiting_for());
  }
}

absl::Status ClientImpl::Done(bool counts_as_empty) {
  v1::DoneRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_counts_as_empty(counts_as_empty);
  request.set_wait_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.notice_every)));
  for (;;) {
    v1::DoneReply reply;
    PS_RETURN_IF_ERROR(AskChief(
        {.what = "waiting for the end", .call_time = std::chrono::milliseconds(request.wait_ms()) + kAnswerMargin},
        [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
          return FromGrpc(chief.Done(&context, request, &reply));
        }));
    if (reply.all_done()) {
      MutexLock lock(mutex_);
      all_done_ = true;
      lead_ = reply.lead();
      return absl::OkStatus();
    }
    Notice(reply.waiting_for());
  }
}

absl::Status ClientImpl::Leave(const std::string& reason) {
  if (rolled_back_) return Ended(absl::UnknownError(""));  // Nobody knows this member any more.
  left_ = true;
  // The last one has ended: it would find the rank gone.
  if (heartbeats_ != nullptr) heartbeats_->Stop();
  v1::LeaveRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_reason(reason);
  request.set_not_finite(!reason.empty() && found_not_finite_);
  bool fenced = false;
  const auto leave = [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int earlier) {
    v1::LeaveReply reply;
    const absl::Status status = FromGrpc(chief.Leave(&context, request, &reply));
    fenced = IsFenced(status);
    // The first call arrived, and only its answer was lost.
    return earlier > 0 && absl::IsFailedPrecondition(status) ? absl::OkStatus() : Annotate(status, "leaving");
  };
  // With a reason the job failed or continues without this worker; one call is enough.
  if (!reason.empty()) return chief_.Once(kControlCallTime, leave);
  const absl::Status left = chief_.UntilAnswered({.what = "leaving", .call_time = kControlCallTime}, leave);
  // Or it came too late: the job has to be brought to its end once more.
  if (fenced) AskWhyFenced();
  if (rolled_back_) return Ended(absl::UnknownError(""));
  if (!absl::IsUnavailable(left)) return left;
  {
    MutexLock lock(mutex_);
    if (!all_done_) return left;
  }
  // All that the job was to do is done and saved. It may be over: the servers end when the last worker has left.
  Notice(absl::StrCat(Message(left), "; the job's work was done, so this is no error"));
  return absl::OkStatus();
}

absl::StatusOr<HashedWeights> ClientImpl::WeightsHash() {
  const HashJob job = {.channels = channels_,
                       .slices = context_->plan.slices().size(),
                       .one_version = synchronous(),
                       .id = joined_as_.id()};
  const absl::Duration longest = std::max(options_.connect_timeout, server_timeout());
  absl::StatusOr<HashedWeights> hashed = HashWeights(job, After(longest), over_.get_token());
  if (IsFenced(hashed.status())) AskWhyFenced();
  return hashed.ok() ? hashed : Ended(hashed.status());
}

}  // namespace ps
