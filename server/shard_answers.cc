// What a request is answered in the state that the shard is in.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "server/shard_state.h"

namespace ps {
namespace {

absl::Status FencedError(const v1::Identity& id) {
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", id.rank(), ", incarnation ", id.incarnation(),
                   ": fenced: the rank has a new owner, or another generation of the job is running"));
}

}  // namespace

ShardState::Answer ShardState::RefuseOnArrival(const Wait& wait, bool push_ended) {
  const Caller& caller = wait.request.caller;
  if (caller.member() && job.view().number() == 0 && job.Serving().ok()) {
    return absl::UnavailableError(absl::StrCat("shard ", options.shard, " waits for the chief"));
  }
  if (wait.request.push.has_value()) {
    PS_RETURN_IF_ERROR(job.Serving());
    if (!job.IsMember(caller.id)) {
      Wait fenced = wait;
      return Tell(fenced, v1::ANSWER_FENCED, wait.parked_at);
    }
    if (push_ended) PS_RETURN_IF_ERROR(pushes.End(wait.session, caller.id, *wait.request.push));
    return std::nullopt;
  }
  PS_RETURN_IF_ERROR(job.ServingReads(caller.member(), readable()));
  // A job that is finished has no members any more.
  const bool finished = job.finished() && caller.id.generation() == job.view().generation();
  if (caller.member() && !finished && !job.IsMember(caller.id)) return FencedError(caller.id);
  return std::nullopt;
}

ShardState::Answer ShardState::AnswerNow(Wait& wait, TimePoint now) {
  if (wait.request.push.has_value()) {
    Answer answer = AnswerPush(wait, now);
    if (wait.request.push.has_value() || answer.has_value()) return answer;
  }
  return AnswerWeights(wait, now);
}

ShardState::Answer ShardState::AnswerPush(Wait& wait, TimePoint now) {
  const v1::Identity& id = wait.request.caller.id;
  const uint64_t step = *wait.request.push;
  PS_RETURN_IF_ERROR(job.Serving());
  if (pushes.ledger().Seen(id.rank(), step)) return Tell(wait, pushes.Tell(id.rank(), step), now);
  if (!job.Owns(id.rank(), id.incarnation())) return Tell(wait, v1::ANSWER_FENCED, now);
  return std::nullopt;
}

ShardState::Answer ShardState::Tell(Wait& wait, v1::Answer answer, TimePoint now) {
  if (answer == v1::ANSWER_FENCED) pushes.CountFenced();
  v1::PushReply& reply = wait.answer.push.emplace();
  reply.set_answer(answer);
  reply.set_version(parameters == nullptr ? 0 : parameters->version());
  reply.set_generation(job.view().generation());
  reply.set_waited_us(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now - wait.parked_at).count()));
  reply.set_next_step(pushes.ledger().NextStep(wait.request.caller.id.rank()));
  if (mode->synchronous()) reply.set_next_step(mode->step());
  if (answer == v1::ANSWER_FENCED || !wait.request.weights) return wait.answer;
  const std::optional<uint64_t> after = mode->VersionAfter(*wait.request.push);
  if (mode->policy().exact_versions()) {
    wait.request.version = after;
  } else if (after.has_value()) {
    wait.request.at_least = std::max(*after, mode->step());  // The job's current step, not one that is decided on.
  }
  wait.request.step = reply.next_step();
  wait.request.push.reset();
  wait.deadline = now + wait.request.wait;
  return std::nullopt;
}

ShardState::Answer ShardState::AnswerWeights(const Wait& wait, TimePoint now) {
  const Caller& caller = wait.request.caller;
  PS_RETURN_IF_ERROR(job.ServingReads(caller.member(), readable()));
  if (caller.member() && !job.finished() && !job.Owns(caller.id.rank(), caller.id.incarnation())) {
    return FencedError(caller.id);
  }
  const bool computes = caller.member() && wait.request.computes;
  const absl::Status failed = job.Failed();
  const bool over = !failed.ok() || job.finished();
  if ((!over && !job.running()) || parameters->updating_in_place()) return std::nullopt;
  const uint64_t current = parameters->version();
  const uint64_t wanted = wait.request.version.value_or(std::max(current, wait.request.at_least.value_or(0)));
  if (wanted > current) {
    const bool none_follows = over && !updater.in_the_making() && (updater.idle() || !failed.ok());
    if (!none_follows) return std::nullopt;
    PS_RETURN_IF_ERROR(failed);
    return absl::FailedPreconditionError(
        absl::StrCat("the job is finished, and shard ", options.shard, " is at version ", current));
  }
  if (wanted < current) {
    return absl::FailedPreconditionError(absl::StrCat("version ", wanted, " of shard ", options.shard,
                                                      " is no longer kept; it is at version ", current));
  }
  if (!over) {
    const absl::Status may = parameters->readers().May(caller.reader(), current);
    if (absl::IsUnavailable(may)) return std::nullopt;  // It waits until the member has released an older version.
    PS_RETURN_IF_ERROR(may);
    if (computes && !mode->MayRead(caller.id.rank(), NextStep(wait.request))) return std::nullopt;
  }
  ShardAnswer answer = wait.answer;
  answer.weights = parameters->Pin(caller.reader(), now);
  if (caller.member() && mode->policy().has_local_steps()) {
    answer.hyperparameters = ValuesOf(updater.next_hyperparameters(), setup.optimizer);
    answer.schedule = updater.next_schedule();
    answer.position = updater.published_position();
  }
  if (answer.push.has_value() && mode->synchronous()) answer.push->set_next_step(current);
  if (computes && !over && mode->delay_compensation() != 0) {
    Pulled& kept = pulled[caller.id.rank()];
    discarded.push_back(std::move(kept.weights));
    kept = {.incarnation = caller.id.incarnation(), .weights = parameters->Keep()};
  }
  return answer;
}

// A rank that has pushed goes on at its next step, whatever it says.
uint64_t ShardState::NextStep(const ShardRequest& request) const {
  const v1::Identity& id = request.caller.id;
  const uint64_t next = pushes.ledger().NextStep(id.rank());
  const bool has_pushed = pushes.ledger().Incarnation(id.rank()) == id.incarnation();
  return has_pushed ? next : std::max(next, request.step.value_or(0));
}

void ShardState::AbandonDropped() {
  Pushes dropped = pushes.TakeDropped();
  if (!dropped.empty()) updater.Abandon();
  discarded.insert(discarded.end(), dropped.begin(), dropped.end());
}

void ShardState::OnRead(const ShardRequest& request) {
  if (request.computes && request.caller.member()) mode->Reads(request.caller.id.rank(), NextStep(request));
}

absl::Status ShardState::TimedOut(const Wait& wait, TimePoint now) const {
  const ShardRequest& request = wait.request;
  const std::string what = request.push.has_value()      ? absl::StrCat("the answer to step ", *request.push)
                           : request.version.has_value() ? absl::StrCat("version ", *request.version)
                                                         : std::string("the newest version");
  std::string why = WaitingFor(now);
  const std::shared_ptr<Push> push =
      request.push.has_value()
          ? pushes.FindComplete(request.caller.id.rank(), request.caller.id.incarnation(), *request.push)
          : nullptr;
  if (why.empty() && push != nullptr && MeasuresFirst(*push)) why = "waiting for its norms on the other shards";
  if (!request.push.has_value() && job.running() && request.version.value_or(0) <= parameters->version()) {
    const absl::Status may = parameters->readers().May(request.caller.reader(), parameters->version());
    if (!may.ok()) why = Message(may);
  }
  if (why.empty()) why = absl::StrCat("it is at version ", parameters == nullptr ? 0 : parameters->version());
  return absl::DeadlineExceededError(absl::StrCat("shard ", options.shard, ": ", request.caller.reader().ToString(),
                                                  " waited ", FormatSeconds(now - wait.parked_at), " for ", what, ": ",
                                                  why));
}

}  // namespace ps
