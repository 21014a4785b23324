// The chief's part in checkpoints, and in going back to one.
#include <algorithm>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "server/chief/chief.h"
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

void Chief::Checkpoint(TimePoint now, TimePoint deadline, CheckpointCallback callback) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  absl::Status refused = job_.Serving();
  if (!takes_checkpoints()) refused = absl::FailedPreconditionError("this job takes no checkpoints (--checkpoint_dir)");
  if (refused.ok() && job_.phase() != v1::PHASE_RUNNING) {
    refused = absl::FailedPreconditionError("checkpoints are taken while the job runs; it is not running yet");
  }
  if (refused.ok() && asked_.size() >= kMaxAsked) {
    refused = absl::ResourceExhaustedError("too many others have asked for a checkpoint");
  }
  if (!refused.ok()) return outbox_.Add([callback = std::move(callback), refused] { callback(refused); });
  if (job_.finishing() && saved_the_end_ && rounds_.last_version().has_value()) {  // Nothing comes after the last one.
    v1::CheckpointReply last;
    last.set_path(checkpoint_path_);
    last.set_version(*rounds_.last_version());
    return outbox_.Add([callback = std::move(callback), last] { callback(last); });
  }
  const bool is_last = !rounds_.idle() && manifest_.finished;
  asked_.push_back({.number = is_last ? *rounds_.number() : 0, .deadline = deadline, .callback = std::move(callback)});
  MoveCheckpoint(now);
}

void Chief::MoveCheckpoint(TimePoint now) {
  if (!takes_checkpoints() || superseded_ || job_.ended()) return;
  const auto expired = std::stable_partition(asked_.begin(), asked_.end(),
                                             [now](const AskedFor& asked) { return asked.deadline > now; });
  for (auto asked = expired; asked != asked_.end(); ++asked) {
    const std::string waiting = job_.WaitingFor(now);
    outbox_.Add([callback = std::move(asked->callback), waiting] {
      callback(absl::DeadlineExceededError(
          absl::StrCat("the checkpoint is not complete yet", waiting.empty() ? "" : ": ", waiting)));
    });
  }
  asked_.erase(expired, asked_.end());
  // A job that was restored when it had finished has gone on.
  if (!finishing_since_.has_value() && rounds_.last_version() < job_.shards().applied_version(0))
    saved_the_end_ = false;
  const bool last = job_.finishing() && !saved_the_end_;
  if (last && !finishing_since_.has_value()) finishing_since_ = now;
  // The version that it is to be of may never come.
  if (last && cut_.idle() && !rounds_.idle() && !manifest_.finished) {
    for (AskedFor& asked : asked_) asked.number = 0;
    rounds_.Abandon();
  }
  if (!rounds_.idle()) {
    const bool late = now - checkpoint_began_ > job_.options().progress_timeout;
    if (late) EndCheckpoint(absl::DeadlineExceededError("not written within --progress_timeout"), now);
    return;
  }
  if (!cut_.idle()) return;
  const bool runs = job_.phase() == v1::PHASE_RUNNING && !job_.finishing();
  const bool due = runs && (!asked_.empty() || rounds_.Due(job_.shards().applied_version(0), now));
  const bool at_once = last ? !tried_the_end_ || rounds_.MayRetry(now) : job_.AwaitsFirstCheckpoint(now);
  if (at_once) return BeginCheckpoint(/*at_once=*/true, now);
  if (due) BeginCheckpoint(/*at_once=*/false, now);
}

void Chief::BeginCheckpoint(bool at_once, TimePoint now) {
  const uint64_t number = rounds_.Begin();
  job_.BeginRunsCut();
  for (AskedFor& asked : asked_) asked.number = number;
  checkpoint_began_ = now;
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
  // As a change of hyperparameters: ahead of any version that a shard can have begun.
  if (!at_once && job_.names_sets()) commit.set_version(job_.mode().step() + 2);
  checkpoint_version_ = commit.has_version() ? std::optional<uint64_t>(commit.version()) : std::nullopt;
  const bool freeze = !at_once && !job_.mode().synchronous();
  TellCut(cut_.Begin(std::move(commit), freeze, now,
                     now + std::max<std::chrono::nanoseconds>(kCutTime, job_.options().cut_timeout)));
}

void Chief::OnCheckpointWritten(uint32_t shard, const v1::CheckpointWritten& written, TimePoint now) {
  if (superseded_ || job_.ended()) return;
  const auto outcome = rounds_.OnWritten(shard, written);
  if (!outcome.has_value()) return;
  if (!outcome->ok()) return EndCheckpoint(outcome->status(), now);
  CommitCheckpoint(**outcome, now);
}

void Chief::CommitCheckpoint(const std::vector<v1::CheckpointWritten>& parts, TimePoint now) {
  const bool same = std::all_of(parts.begin(), parts.end(),
                                [&](const auto& part) { return part.version() == parts.front().version(); });
  if (!same && job_.mode().synchronous()) {
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
  outbox_.Add([this, manifest = manifest_] {
    checkpoint_calls_.commit(
        manifest, [this, number = manifest.number](const absl::Status& committed) { OnCommitted(number, committed); });
  });
}

void Chief::OnCommitted(uint64_t number, const absl::Status& committed) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (superseded_ || rounds_.number() != number) return;
  const TimePoint now = Now();
  if (!committed.ok()) return EndCheckpoint(committed, now);
  kept_.push_back(number);
  while (kept_.size() > job_.options().checkpoints->keep) kept_.pop_front();
  v1::ChiefUpdate update;
  update.set_keep_checkpoints_from(kept_.front());
  update.set_newest_checkpoint(number);
  update.set_newest_version(manifest_.version());
  Broadcast(update);
  job_.HasCheckpoint(manifest_.version());
  streams_.Tell(job_, now, outbox_);
  EndCheckpoint(absl::OkStatus(), now);
}

void Chief::EndCheckpoint(const absl::Status& status, TimePoint now) {
  const uint64_t number = *rounds_.number();
  job_.EndRunsCut();
  const double seconds = SecondsOf(now - checkpoint_began_);
  v1::CheckpointReply reply;
  reply.set_path(checkpoint_calls_.path_of(number));
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
    checkpoint_failure_ = Message(status);
    fields["failure"] = Message(status);
    fields["last_complete_s"] =
        rounds_.last_at().has_value() ? nlohmann::ordered_json(SecondsOf(now - *rounds_.last_at())) : nullptr;
    spdlog::warn("checkpoint {} failed, and the job goes on without it: {}", reply.path(), Message(status));
  }
  if (metrics_ != nullptr) metrics_->Write("checkpoint", fields);
  AnswerAsked(number, status.ok() ? absl::StatusOr<v1::CheckpointReply>(reply) : status);
  if (manifest_.finished) {
    tried_the_end_ = true;
    const bool gives_up = now - *finishing_since_ >= job_.options().checkpoints->server_timeout;
    saved_the_end_ = status.ok() || gives_up;
  }
  if (job_.AwaitsFirstCheckpoint(now)) {
    job_.HasFirstCheckpoint();
    return ChangeView(now);
  }
  AnswerDones(now);
}

std::string Chief::WaitingForLastCheckpoint() const {
  return absl::StrCat("the last checkpoint to be complete",
                      checkpoint_failure_.empty() ? "" : absl::StrCat("; tried again, since ", checkpoint_failure_));
}

v1::CheckpointStatus Chief::CheckpointsStatus(TimePoint now) const {
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

void Chief::AbandonCheckpoint() {
  rounds_.Abandon();
  for (AskedFor& asked : asked_) asked.number = 0;
  AnswerAsked(0, job_.Serving());
}

void Chief::AnswerAsked(uint64_t number, const absl::StatusOr<v1::CheckpointReply>& reply) {
  const auto answered = std::stable_partition(asked_.begin(), asked_.end(),
                                              [number](const AskedFor& asked) { return asked.number != number; });
  for (auto asked = answered; asked != asked_.end(); ++asked) {
    outbox_.Add([callback = std::move(asked->callback), reply] { callback(reply); });
  }
  asked_.erase(answered, asked_.end());
}

// ---- Going back to one

void Chief::RollBack(const std::string& reason, TimePoint now, const std::string& damaged, uint64_t heard_of) {
  if (superseded_ || job_.ended()) return;
  spdlog::warn("{}; the job goes back to its last checkpoint", reason);
  EndGeneration(reason, now);
  outbox_.Add([this, reason, damaged, heard_of] { checkpoint_calls_.roll_back(reason, damaged, heard_of); });
}

void Chief::Supersede(const std::string& reason, TimePoint now) {
  const OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  if (!superseded_ && !job_.ended()) EndGeneration(reason, now);
}

void Chief::EndGeneration(const std::string& reason, TimePoint now) {
  superseded_ = true;
  job_.Supersede(absl::StrCat("generation ", job_.options().generation, " of the job is over: ", reason));
  cut_.Abandon();
  if (set_callback_) AnswerSet(job_.Serving());
  AbandonCheckpoint();
  AnswerJoins(now);
  AnswerDones(now);
  AnswerTakes(now);
}

}  // namespace ps
