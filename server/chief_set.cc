// The chief's part in changing hyperparameters.
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/schedule_proto.h"
#include "common/status.h"
#include "server/chief.h"

namespace ps {

void Chief::SetHyperparameters(const v1::SetHyperparametersRequest& request, TimePoint now, TimePoint deadline,
                               SetCallback callback) {
  OutboxDrain drain(outbox_);
  MutexLock lock(mutex_);
  absl::StatusOr<JobState::Setting> setting = job_.CheckSet(request);
  if (setting.ok() && set_callback_) {
    setting = absl::ResourceExhaustedError(
        absl::StrCat("another change is under way: ", ToString(setting_.values, setting_.schedule)));
  }
  if (!setting.ok()) return outbox_.Add([callback, status = setting.status()] { callback(status); });
  spdlog::info("asked to set {}", ToString(setting->values, setting->schedule));
  setting_ = *std::move(setting);
  set_callback_ = std::move(callback);
  set_deadline_ = deadline;
  set_begun_ = false;
  MoveSet(now);
}

void Chief::MoveSet(TimePoint now) {
  if (!set_callback_ || set_begun_) return;
  if (!cut_.idle()) {
    if (now >= set_deadline_) AnswerSet(absl::DeadlineExceededError("nothing is changed: a checkpoint is being taken"));
    return;
  }
  set_begun_ = true;
  v1::Cut commit;
  ToProto(setting_.values, commit.mutable_hyperparameters());
  if (setting_.schedule.has_value()) *commit.mutable_schedule() = ToProto(*setting_.schedule);
  // One ahead of any version that a shard can have begun: decisions and this message come to it in one order.
  if (job_.names_sets()) commit.set_version(job_.mode().step() + 2);
  const bool freeze = !job_.names_sets() && job_.shards().size() > 1;
  TellCut(cut_.Begin(std::move(commit), freeze, now, set_deadline_));
}

void Chief::TellCut(const v1::Cut& cut) {
  if (cut.phase() == v1::Cut::COMMIT && cut.checkpoint() == 0) job_.OnSet(setting_);
  // A change of the very version that a checkpoint is of is part of it.
  const bool is_saved = cut.checkpoint() > 0 || (cut.has_version() && cut.version() == checkpoint_version_);
  if (cut.phase() == v1::Cut::COMMIT && is_saved) saved_job_ = job_.Save();
  v1::ChiefUpdate update;
  *update.mutable_cut() = cut;
  Broadcast(update);
}

void Chief::MoveCut(const CutCoordinator::Outcome& outcome) {
  if (outcome.tell.has_value()) TellCut(*outcome.tell);
  if (!outcome.ended.has_value()) return;
  if (!set_callback_ || !set_begun_) {  // It was a checkpoint's: its parts are being written.
    // Its round may have ended before, as one that took too long.
    if (!outcome.ended->ok() && !rounds_.idle()) EndCheckpoint(outcome.ended->status(), Now());
    return;
  }
  if (!outcome.ended->ok()) return AnswerSet(outcome.ended->status());
  v1::SetHyperparametersReply reply;
  for (const uint64_t version : **outcome.ended) {
    v1::ShardVersion* const shard = reply.add_shards();
    shard->set_shard(static_cast<uint32_t>(reply.shards_size() - 1));
    shard->set_version(version);
  }
  AnswerSet(reply);
}

void Chief::AnswerSet(const absl::StatusOr<v1::SetHyperparametersReply>& reply) {
  if (!reply.ok())
    spdlog::warn("setting {}: {}", ToString(setting_.values, setting_.schedule), Message(reply.status()));
  outbox_.Add([callback = std::exchange(set_callback_, nullptr), reply] { callback(reply); });
}

}  // namespace ps
