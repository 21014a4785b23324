// The shard's part in checkpoints: takes them, and begins with one.
#include <algorithm>
#include <memory>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "server/checkpoint/saved_state.h"
#include "server/shard/shard_core.h"

namespace ps {

// ---- Taking one

void ShardState::SetCheckpointDue(const v1::Cut& commit) {
  checkpoint_due = {.number = commit.checkpoint(), .version = {}, .changes_to = 0};
  if (!mode->coordinated()) return;
  checkpoint_due->version = commit.at_once() ? mode->step() : CommitVersion(commit);
  // All shards have heard of the same changes by now, and no other version than those that are decided comes.
  const auto& pending = updater.Save().timeline.pending;
  if (commit.at_once() && !pending.empty()) checkpoint_due->changes_to = pending.back().version;
}

nlohmann::ordered_json ShardState::Save(uint64_t changes_to) const {
  nlohmann::ordered_json saved_mode = mode->Save();
  // Sets that are decided on already are not part of it.
  if (mode->coordinated()) saved_mode["step"] = parameters->version();
  SavedUpdates saved_updater = updater.Save();
  if (mode->coordinated()) {
    // Nor are changes of later versions: some shards may not have heard of them yet.
    const uint64_t last = std::max(changes_to, parameters->version());
    std::erase_if(saved_updater.timeline.pending, [last](const auto& change) { return change.version > last; });
  }
  const v1::SavedShard saved = SaveShard(pushes.ledger(), saved_updater, /*outer=*/!setup.outer.empty());
  return {{"mode", std::move(saved_mode)}, {"shard", MessageToJson(saved)}};
}

std::vector<v1::RankStep> ShardState::SavedSteps() const {
  std::vector<v1::RankStep> steps;
  for (const Ledger::Last& last : pushes.ledger().Lasts()) steps.push_back(StepAfter(last));
  return steps;
}

void ShardCore::TakeCheckpoint() {
  if (!state_.checkpoint_due.has_value() || !has_store_ || state_.parameters == nullptr) return;
  if (state_.writes_checkpoint || state_.job.shut_down()) return;
  const ShardState::CheckpointDue due = *state_.checkpoint_due;
  const uint64_t version = state_.parameters->version();
  if (version < due.version.value_or(version) || !state_.parameters->may_snapshot()) return;
  state_.checkpoint_due.reset();
  state_.writes_checkpoint = true;
  state_.record.OnCheckpointBegins(options_.clock());
  actions_.emplace_back(WriteCheckpoint{.part = {.number = due.number,
                                                 .generation = state_.job.view().generation(),
                                                 .snapshot = state_.parameters->TakeSnapshot(),
                                                 .state = state_.Save(due.changes_to)},
                                        .steps = state_.SavedSteps(),
                                        .samples = state_.updater.Save().position});
}

void ShardCore::FailCheckpoint(const v1::Cut& commit, const std::string& why) {
  state_.record.OnCheckpointFailed();
  v1::ShardReport report = state_.ReportCut(commit, state_.parameters->version());
  report.mutable_checkpoint()->set_number(commit.checkpoint());
  report.mutable_checkpoint()->set_failure(why);
  Report(std::move(report));
}

ShardReady ShardCore::OnCheckpointWritten(v1::CheckpointWritten written) {
  state_.writes_checkpoint = false;
  written.failure().empty() ? state_.record.OnCheckpointWritten(options_.clock()) : state_.record.OnCheckpointFailed();
  v1::ShardReport report;
  *report.mutable_checkpoint() = std::move(written);
  Report(std::move(report));
  TakeCheckpoint();  // The last one may wait for it.
  return Take();
}

// ---- Beginning with one

void ShardCore::BeginRestore() {
  if (!has_store_) return Fail("the job begins with a checkpoint, but this server has no --checkpoint_dir");
  const Parameters::Update memory = state_.parameters->BeginRestore();
  const auto skipped = std::make_shared<std::vector<int64_t>>(state_.layout->slices());
  std::vector<WantedPart> wanted;
  for (size_t local = 0; local < state_.layout->slices(); ++local) {
    const SliceInfo& slice = state_.layout->slice(local);
    const auto elements = static_cast<size_t>(slice.elements);
    WantedPart& part = wanted.emplace_back();
    part.tensor = slice.tensor;
    part.first = slice.offset;
    part.weights = {memory.new_weights + slice.shard_offset, elements};
    for (size_t k = 0; k < state_.parameters->state_tensors(); ++k) {
      part.state.emplace_back(memory.new_state[k] + slice.shard_offset, elements);
    }
    part.skipped = &(*skipped)[local];
  }
  actions_.emplace_back(
      ReadCheckpoint{.restore = state_.job.view().restore(), .wanted = std::move(wanted), .skipped = skipped});
}

ShardReady ShardCore::OnRestored(const absl::StatusOr<CheckpointStore::Loaded>& loaded, SkippedUpdates skipped) {
  absl::Status restored = loaded.ok() ? state_.Restore(loaded->state, loaded->settings) : loaded.status();
  if (restored.ok()) {
    const absl::Status rounded = state_.parameters->FinishRestore(loaded->version, std::move(skipped));
    // An earlier checkpoint might do, but then this one would be lost in time.
    if (!rounded.ok()) {
      Fail(absl::StrCat(state_.job.view().restore().path(), ": ", Message(rounded),
                        "; give the job the --weights_wire_dtype that it had, or bfloat16, or name an earlier "
                        "checkpoint (--restore)"));
      return Take();
    }
  }
  if (!restored.ok()) {
    v1::ShardReport report;
    report.set_restore_failure(absl::StrCat("shard ", options_.shard, ": ", Message(restored)));
    Report(std::move(report));
    return Take();
  }
  spdlog::info("restored version {}", loaded->version);
  Report({});
  Advance();
  AnswerWaits();
  return Take();
}

absl::Status ShardState::Restore(const nlohmann::ordered_json& saved,
                                 const std::map<std::string, std::string>& settings) {
  PS_ASSIGN_OR_RETURN(const nlohmann::ordered_json saved_mode, ObjectIn(saved, "mode"));
  PS_ASSIGN_OR_RETURN(const nlohmann::ordered_json saved_shard, ObjectIn(saved, "shard"));
  v1::SavedShard message;
  PS_RETURN_IF_ERROR(JsonToMessage(saved_shard, &message));
  PS_ASSIGN_OR_RETURN(RestoredShard restored, RestoreShard(message, setup.hyperparameters));
  PS_RETURN_IF_ERROR(mode->Load(saved_mode));
  ApplyChangedFlags(settings, options.settings, setup.hyperparameters, updater.next_schedule(),
                    restored.updater.timeline);
  updater.Restore(restored.updater);
  pushes.Restore(std::move(restored.ledger), restored.updater.dropped_samples);
  SetMembers();  // Whom the mode has loaded had no owners.
  return absl::OkStatus();
}

}  // namespace ps
