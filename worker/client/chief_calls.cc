#include "worker/client/chief_calls.h"

#include "absl/strings/str_cat.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "common/sync.h"

namespace ps {
namespace {

// Between two attempts: the chief may have only just started, or have many to answer.
constexpr std::chrono::milliseconds kChiefPauseFirst(200);
constexpr std::chrono::milliseconds kChiefPauseLongest(400);
constexpr std::chrono::milliseconds kLastAttempt(200);  // The last one takes so long at least.

}  // namespace

ChiefCalls::ChiefCalls(const std::shared_ptr<grpc::Channel>& channel, const ClientOptions& options)
    : stub_(v1::Chief::NewStub(channel)),
      server_(options.server),
      patience_(options.rejoin_timeout > absl::ZeroDuration()
                    ? Patience{.longest = ToChrono(options.rejoin_timeout), .for_restart = true}
                    : Patience{.longest = ToChrono(options.connect_timeout)}),
      on_notice_(options.on_notice),
      notice_every_(ToChrono(options.notice_every)) {}

absl::Status ChiefCalls::Once(std::chrono::nanoseconds call_time, const Call& call) {
  grpc::ClientContext context;
  SetDeadline(context, call_time);
  return call(*stub_, context, 0);
}

absl::Status ChiefCalls::UntilAnswered(const Wait& wait, const Call& call) {
  const TimePoint begun = Now();
  TimePoint next_notice = begun;  // A call that waits may be answered much more often.
  const Patience patience = wait.patience.value_or(patience_);
  RetryPolicy retry({.connect_timeout = patience.longest,
                     .give_up = wait.give_up,
                     .pause_first = kChiefPauseFirst,
                     .pause_longest = kChiefPauseLongest,
                     .spread = spread_},
                    begun);
  for (int earlier = 0;; ++earlier) {
    const TimePoint attempt = Now();
    auto call_time = wait.call_time;
    if (wait.shortens) {
      const auto left = std::max<std::chrono::nanoseconds>(wait.give_up - attempt, kLastAttempt);
      call_time = std::min({call_time, retry.TimeLeft(attempt, begun), left});
    }
    retry.BeginAttempt(attempt, attempt + call_time);
    grpc::ClientContext context;
    SetDeadline(context, call_time);
    absl::Status status;
    {
      const std::stop_callback cancel(wait.stop, [&context] { context.TryCancel(); });
      status = call(*stub_, context, earlier);
    }
    if (wait.stop.stop_requested()) return absl::CancelledError(wait.what + ": stopped");
    if (status.ok()) return status;
    if (absl::IsCancelled(status)) status = absl::UnavailableError("the server ended the call");
    const TimePoint now = Now();
    const RetryDecision decision = retry.ClassifyFailure(status, now, begun);
    const std::string problem = absl::StrCat("--server=", server_, ": ", ConnectionProblem(status));
    switch (decision.outcome) {
      case RetryDecision::Outcome::kFinal:
      case RetryDecision::Outcome::kTimeUp:
        return status;
      case RetryDecision::Outcome::kUnreachable:
        return Unavailable(problem, "; gave up ", wait.what, " after ", FormatSeconds(decision.silent),
                           decision.silent > patience.longest ? absl::StrCat(" (", patience.flag(), ")") : "");
      case RetryDecision::Outcome::kRetry:
        break;
    }
    // An answer that came late says whom it waited for; one that did not come at all says nothing.
    if (decision.notice && on_notice_ && (!decision.waiting || now >= next_notice)) {
      if (decision.waiting) next_notice = now + notice_every_;
      on_notice_(decision.waiting ? Message(status) : problem + patience.Trying(decision.silent));
    }
    PauseUntil(now + decision.pause, wait.stop);
    if (wait.stop.stop_requested()) return absl::CancelledError(wait.what + ": stopped");
  }
}

}  // namespace ps
