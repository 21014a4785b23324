#include "server/checkpoint/saved_state.h"

#include <algorithm>
#include <utility>

#include <google/protobuf/util/json_util.h>
#include "absl/strings/match.h"
#include "common/check.h"
#include "common/optimizers/hyperparameters.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "server/config/optimizer_setup.h"
#include "server/config/options.h"

namespace ps {
namespace {

absl::StatusOr<HyperparameterValues> KnownValues(const HyperparameterMessages& messages) {
  const HyperparameterValues known = AllValues(Hyperparameters());
  for (const v1::Hyperparameter& message : messages) {
    if (!known.contains(message.name())) return InvalidArgument("hyperparameters: ", message.name(), " is unknown");
  }
  return FromProto(messages);
}

void PutFlag(const std::string& flag, const HyperparameterValues& flags, HyperparameterTimeline::Saved& timeline) {
  timeline.made_with = Changed(timeline.made_with, {{flag, flags.at(flag)}});
  if (flag == InfoOf(&Hyperparameters::learning_rate).flag) timeline.told.reset();
  timeline.groups = WithoutOwn(timeline.groups, {{flag, flags.at(flag)}});
  for (HyperparameterTimeline::Change& change : timeline.pending) change.values.erase(flag);
}

}  // namespace

nlohmann::ordered_json MessageToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto written = google::protobuf::util::MessageToJsonString(message, &text, options);
  Check(written.ok(), "a message of known fields is written as JSON");
  return nlohmann::ordered_json::parse(text);
}

absl::Status JsonToMessage(const nlohmann::ordered_json& json, google::protobuf::Message* message) {
  const auto read = google::protobuf::util::JsonStringToMessage(
      json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), message);
  if (read.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string(read.message().data(), read.message().size()));
}

absl::StatusOr<nlohmann::ordered_json> ObjectIn(const nlohmann::ordered_json& json, const std::string& field) {
  const auto found = json.is_object() ? json.find(field) : json.end();
  if (!json.is_object() || found == json.end() || !found->is_object()) {
    return InvalidArgument("state.", field, ": expected an object");
  }
  return *found;
}

v1::SavedShard SaveShard(const Ledger& ledger, const SavedUpdates& updater, bool outer) {
  v1::SavedShard saved;
  for (const Ledger::Last& last : ledger.Lasts()) {
    v1::SavedShard::Push* const push = saved.add_ledger();
    push->set_rank(last.rank);
    push->set_incarnation(last.incarnation);
    push->set_step(last.step);
    push->set_answer(last.answer);
    push->set_runs(last.runs);
  }
  const HyperparameterTimeline::Saved& timeline = updater.timeline;
  HyperparameterValues values = AllValues(timeline.made_with);
  for (const HyperparameterInfo& each : OuterHyperparameterTable()) {
    if (!outer) values.erase(each.flag);
  }
  ToProto(values, saved.mutable_hyperparameters());
  if (timeline.told.has_value()) saved.set_told_learning_rate(*timeline.told);
  if (timeline.groups != nullptr) {
    ToProto(*timeline.groups, saved.mutable_groups());
    saved.mutable_groups(0)->Clear();  // What changed for all is among the hyperparameters.
  }
  *saved.mutable_schedule() = ToProto(timeline.schedule);
  for (const HyperparameterTimeline::Change& change : timeline.pending) {
    v1::SavedShard::Change* const out = saved.add_changes();
    out->set_version(change.version);
    ToProto(change.values, out->mutable_values());
    if (change.schedule.has_value()) *out->mutable_schedule() = ToProto(*change.schedule);
  }
  saved.set_position(updater.position);
  saved.set_dropped_samples(updater.dropped_samples);
  return saved;
}

absl::StatusOr<RestoredShard> RestoreShard(const v1::SavedShard& saved, const Hyperparameters& flags) {
  RestoredShard restored;
  for (const v1::SavedShard::Push& push : saved.ledger()) {
    restored.ledger.Record({.rank = push.rank(),
                            .incarnation = push.incarnation(),
                            .step = push.step(),
                            .answer = push.answer(),
                            .runs = push.runs()});
  }
  HyperparameterTimeline::Saved& timeline = restored.updater.timeline;
  PS_ASSIGN_OR_RETURN(const HyperparameterValues values, KnownValues(saved.hyperparameters()));
  timeline.made_with = Changed(flags, values);
  if (saved.has_told_learning_rate()) timeline.told = saved.told_learning_rate();
  for (const v1::GroupHyperparameters& group : saved.groups()) {
    PS_RETURN_IF_ERROR(Annotate(KnownValues(group.hyperparameters()).status(), "groups"));
  }
  if (saved.groups_size() > 0) timeline.groups = std::make_shared<const GroupValues>(FromProto(saved.groups()));
  PS_ASSIGN_OR_RETURN(timeline.schedule, Annotate(FromProto(saved.schedule()), "schedule"));
  for (const v1::SavedShard::Change& change : saved.changes()) {
    PS_ASSIGN_OR_RETURN(const HyperparameterValues changed, KnownValues(change.values()));
    timeline.pending.push_back({.version = change.version(), .values = changed});
    if (!change.has_schedule()) continue;
    PS_ASSIGN_OR_RETURN(timeline.pending.back().schedule, Annotate(FromProto(change.schedule()), "schedule"));
  }
  restored.updater.position = saved.position();
  restored.updater.dropped_samples = saved.dropped_samples();
  return restored;
}

bool IsScheduleFlag(const std::string& flag) { return flag == "warmup" || absl::StartsWith(flag, "schedule"); }

std::vector<std::string> ChangedFlags(const std::map<std::string, std::string>& stored,
                                      const std::map<std::string, std::string>& now) {
  std::map<std::string, std::string> before = stored;
  before.merge(SharedSettings(ServerOptions()));
  std::vector<std::string> changed;
  for (const auto& [flag, value] : now) {
    const auto found = before.find(flag);
    if (found == before.end() || found->second != value) changed.push_back(flag);
  }
  // A length that is not given is not among the settings.
  for (const auto& [flag, value] : stored) {
    if (IsScheduleFlag(flag) && !now.contains(flag)) changed.push_back(flag);
  }
  return changed;
}

void ApplyChangedFlags(const std::map<std::string, std::string>& stored, const std::map<std::string, std::string>& now,
                       const Hyperparameters& flags, const Schedule& schedule,
                       HyperparameterTimeline::Saved& timeline) {
  const HyperparameterValues values = AllValues(flags);
  const std::vector<std::string> changed = ChangedFlags(stored, now);
  for (const std::string& flag : changed) {
    if (values.contains(flag)) PutFlag(flag, values, timeline);
  }
  if (std::none_of(changed.begin(), changed.end(), IsScheduleFlag)) return;
  timeline.schedule = schedule;
  for (HyperparameterTimeline::Change& change : timeline.pending) change.schedule.reset();
}

}  // namespace ps
