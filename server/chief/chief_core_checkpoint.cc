// The chief's part in checkpoints, and in going back to one.
#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/checkpoint/checkpoint_dir.h"
#include "common/status.h"
#include "server/chief/chief_core.h"
#include "server/chief/job_messages.h"

namespace ps {
namespace {

constexpr size_t kMaxAsked = 64;
// For all shards to come to the same point, or one attempt (--cut_timeout) where that takes longer; then it is tried
// again later.
constexpr std::chrono::seconds kCutTime{10};

double SecondsOf(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

// ---- Taking one

void ChiefCore::Checkpoint(uint64_t call, TimePoint now, TimePoint deadline) {
  absl::Status refused = job_.Serving();
  if (!takes_checkpoints()) refused = absl::FailedPreconditionError("this job takes no checkpoints (--checkpoint_dir)");
  if (refused.ok() && job_.phase() != v1::PHASE_RUNNING) {
    refused = absl::FailedPreconditionError("checkpoints are taken while the job runs; it is not running yet");
  }
  if (refused.ok() && asked_.size() >= kMaxAsked) {
    refused = absl::ResourceExhaustedError("too many others have asked for a checkpoint");
  }
  if (!refused.ok()) return Add(Answer<v1::CheckpointReply>{.call = call, .reply = refused});
  if (job_.finishing() && saved_the_end_ && rounds_.last_version().has_value()) {  // Nothing comes after the last one.
    v1::CheckpointReply last;
    last.set_path(checkpoint_path_);
    last.set_version(*rounds_.last_version());
    return Add(Answer<v1::CheckpointReply>{.call = call, .reply = last});
  }
  const bool is_last = !rounds_.idle() && manifest_.finished;
  asked_.Add({.number = call, .waits_for = is_last ? *rounds_.number() : 0, .deadline = deadline});
  MoveCheckpoint(now);
}

void ChiefCore::MoveCheckpoint(TimePoint now) {
  if (!takes_checkpoints() || job_.over()) return;
  Add(asked_.AnswerWhere([&](const WaitingCall& asked) -> std::optional<absl::StatusOr<v1::CheckpointReply>> {
    if (asked.deadline > now) return std::nullopt;
    const std::string waiting = job_.WaitingFor(now);
    return absl::DeadlineExceededError(
        absl::StrCat("the checkpoint is not complete yet", waiting.empty() ? "" : ": ", waiting));
  }));
  // A job that was restored when it had finished has gone on.
  if (!finishing_since_.has_value() && rounds_.last_version() < job_.shards()[0].applied_version)
    saved_the_end_ = false;
  const bool last = job_.finishing() && !saved_the_end_;
  if (last && !finishing_since_.has_value()) finishing_since_ = now;
  if (last && cut_.idle() && !rounds_.idle() && !manifest_.finished) AbandonRound();
  const bool stands_still = job_.paused() && job_.mode().coordinated();
  if (stands_still && cut_.idle() && !rounds_.idle() && !checkpoint_at_once_) AbandonRound();
  if (!rounds_.idle()) {
    const bool late = now - checkpoint_began_ > job_.options().progress_timeout;
    if (late) EndCheckpoint(absl::DeadlineExceededError("not written within --progress_timeout"), now);
    return;
  }
  if (!cut_.idle()) return;
  const bool runs = job_.phase() == v1::PHASE_RUNNING && !job_.finishing();
  const bool due = runs && (asked_.size() > 0 || rounds_.Due(job_.shards()[0].applied_version, now));
  const bool at_once = last ? !tried_the_end_ || rounds_.MayRetry(now) : job_.AwaitsFirstCheckpoint(now);
  if (at_once) return BeginCheckpoint(/*at_once=*/true, now);
  if (due) BeginCheckpoint(/*at_once=*/stands_still, now);
}

void ChiefCore::BeginCheckpoint(bool at_once, TimePoint now) {
  const uint64_t number = rounds_.Begin();
  job_.runs().BeginCut();
  asked_.AllWaitFor(number);
  checkpoint_began_ = now;
  checkpoint_at_once_ = at_once;
  manifest_ = {.job = job_.options().job,
               .generation = job_.options().generation,
               .number = number,
               .finished = job_.finishing(),
               .num_workers = job_.options().num_workers,
               .layout = job_.plan()->layout(),
               .shards = {},
               .settings = job_.options().settings,
               .state = {}};
  v1::Cut commit;
  commit.set_checkpoint(number);
  commit.set_at_once(at_once);
  // A checkpoint is like a change of hyperparameters: ahead of any version that a shard can have begun. Where none is
  // begun before the chief names its set, that is of the last one named, unless a change is for a later one.
  if (!at_once && job_.names_sets()) {
    commit.set_version(job_.mode().synchronous() ? job_.first_not_begun()
                                                 : std::max(job_.mode().step(), changed_from_));
  }
  checkpoint_version_ = commit.has_version() ? std::optional<uint64_t>(commit.version()) : std::nullopt;
  const bool freeze = !at_once && !job_.mode().coordinated();
  TellCut(cut_.Begin(std::move(commit), freeze, now,
                     now + std::max<std::chrono::nanoseconds>(kCutTime, job_.options().cut_timeout)));
}

void ChiefCore::AbandonRound() {
  asked_.AllWaitFor(0);
  rounds_.Abandon();
}

void ChiefCore::OnCheckpointWritten(uint32_t shard, const v1::CheckpointWritten& written, TimePoint now) {
  if (job_.over()) return;
  const auto outcome = rounds_.OnWritten(shard, written);
  if (!outcome.has_value()) return;
  if (!outcome->ok()) return EndCheckpoint(outcome->status(), now);
  const std::vector<v1::CheckpointWritten>& parts = **outcome;
  const bool same = std::all_of(parts.begin(), parts.end(),
                                [&](const auto& part) { return part.version() == parts.front().version(); });
  if (!same && job_.mode().coordinated()) {
    return EndCheckpoint(absl::InternalError("the shards were at different versions"), now);
  }
  CutSteps steps;
  std::map<RunTaker, uint64_t> runs;
  for (const v1::CheckpointWritten& part : parts) {
    manifest_.shards.push_back({.version = part.version(), .checksum = part.checksum()});
    saved_job_.set_samples(std::max(saved_job_.samples(), part.samples()));
    for (const auto& [rank, step] : FromProto(part.steps())) steps[rank] = std::max(steps[rank], step);
    for (const v1::RankStep& step : part.steps()) {
      uint64_t& used = runs[{.rank = step.rank(), .incarnation = step.incarnation()}];
      used = std::max(used, step.runs());
    }
  }
  ToProto(steps, saved_job_.mutable_steps());
  manifest_.state = ManifestState(saved_job_, job_.runs().Save(runs));
  Add(CommitCheckpoint{.manifest = manifest_});
}

void ChiefCore::OnCommitted(uint64_t number, const absl::Status& committed, TimePoint now) {
  if (job_.superseded() || rounds_.number() != number) return;
  if (!committed.ok()) return EndCheckpoint(committed, now);
  kept_.push_back(number);
  while (kept_.size() > job_.options().checkpoints->keep) kept_.pop_front();
  v1::ChiefUpdate update;
  update.set_keep_checkpoints_from(kept_.front());
  update.set_newest_checkpoint(number);
  update.set_newest_version(manifest_.version());
  Add(shard_streams_.Broadcast(update));
  job_.HasCheckpoint(manifest_.version());
  TellMembers(now);
  EndCheckpoint(absl::OkStatus(), now);
}

void ChiefCore::EndCheckpoint(const absl::Status& status, TimePoint now) {
  const uint64_t number = *rounds_.number();
  job_.runs().EndCut();
  const double seconds = SecondsOf(now - checkpoint_began_);
  v1::CheckpointReply reply;
  reply.set_path(CheckpointDir::Existing(job_.options().checkpoints->path).PathOf(number));
  reply.set_version(manifest_.version());
  nlohmann::ordered_json fields = {{"number", number}, {"seconds", seconds}};
  if (status.ok()) {
    rounds_.Committed(reply.version(), now);
    checkpoint_path_ = reply.path();
    checkpoint_failure_.clear();
    fields["version"] = reply.version();
    spdlog::info("checkpoint {}: version {}, after {:.3f} s", reply.path(), reply.version(), seconds);
  } else {
    rounds_.Failed(now);
    job_.progress().OnCheckpointFailed();
    checkpoint_failure_ = Message(status);
    fields["failure"] = Message(status);
    fields["last_complete_s"] =
        rounds_.last_at().has_value() ? nlohmann::ordered_json(SecondsOf(now - *rounds_.last_at())) : nullptr;
    spdlog::warn("checkpoint {} failed, and the job goes on without it: {}", reply.path(), Message(status));
  }
  Add(WriteMetric{.event = "checkpoint", .fields = std::move(fields)});
  AnswerAsked(number, status.ok() ? absl::StatusOr<v1::CheckpointReply>(reply) : status);
  if (manifest_.finished) {
    tried_the_end_ = true;
    const bool gives_up = now - *finishing_since_ >= job_.options().checkpoints->server_timeout;
    saved_the_end_ = status.ok() || gives_up;
    if (!status.ok() && gives_up) {
      end_not_saved_ = absl::StrCat(
          "the job is finished, but no checkpoint of its end could be written within --server_timeout=",
          FormatSeconds(job_.options().checkpoints->server_timeout), "; if it is started again, it trains on from ",
          checkpoint_path_.empty() ? "its beginning" : checkpoint_path_, ": ", Message(status));
      spdlog::error("{}", end_not_saved_);
    }
  }
  if (job_.AwaitsFirstCheckpoint(now)) {
    job_.HasFirstCheckpoint();
    return ChangeView(now);
  }
  AnswerDones(now);
}

v1::CheckpointStatus ChiefCore::CheckpointsStatus(TimePoint now) const {
  v1::CheckpointStatus status;
  status.set_failure(checkpoint_failure_);
  if (!rounds_.idle()) {
    const auto writing = std::chrono::duration_cast<std::chrono::milliseconds>(now - checkpoint_began_);
    status.set_writing_ms(static_cast<uint64_t>(std::max<int64_t>(writing.count(), 0)));
    status.set_writing(rounds_.WaitingFor());
  }
  if (!rounds_.last_version().has_value()) return status;
  status.set_path(checkpoint_path_);
  status.set_version(*rounds_.last_version());
  const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(now - *rounds_.last_at());
  status.set_age_ms(static_cast<uint64_t>(std::max<int64_t>(age.count(), 0)));
  return status;
}

void ChiefCore::AnswerAsked(uint64_t checkpoint, const absl::StatusOr<v1::CheckpointReply>& reply) {
  Add(asked_.AnswerWhere(
      [&](const WaitingCall& asked) { return asked.waits_for == checkpoint ? std::optional(reply) : std::nullopt; }));
}

void ChiefCore::AbandonCuts() {
  cut_.Abandon();
  if (change_.has_value()) AnswerSet(job_.Serving());
  rounds_.Abandon();
  asked_.AllWaitFor(0);
  AnswerAsked(0, job_.Serving());
}

// ---- Going back to one

void ChiefCore::GoBack(RollBack back, TimePoint now) {
  if (job_.over()) return;
  spdlog::warn("{}; the job goes back to its last checkpoint", back.reason);
  EndGeneration(back.reason, now);
  Add(std::move(back));
}

void ChiefCore::Supersede(const std::string& reason, TimePoint now) {
  if (!job_.over()) EndGeneration(reason, now);
}

void ChiefCore::EndGeneration(const std::string& reason, TimePoint now) {
  job_.Supersede(absl::StrCat("generation ", job_.options().generation, " of the job is over: ", reason));
  AbandonCuts();
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
  AnswerReduces(now);
  MoveStandbys(now);
}

}  // namespace ps
