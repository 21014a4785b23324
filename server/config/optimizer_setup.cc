#include "server/config/optimizer_setup.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/optimizers/optimizer.h"
#include "common/problems.h"
#include "common/status.h"
#include "common/text.h"
#include "server/config/options.h"

namespace ps {
namespace {

// Where each push is a version, no shard's weights are those that the others have at the same time: there is no one
// model that a norm over all of them would be of.
void CheckNormsOverShards(const OptimizerSetup& setup, const ModeOptions& options, uint32_t num_shards,
                          Problems& problems) {
  const std::string mode = CanonicalMode(options.name);
  if (num_shards < 2 || (mode != "asp" && mode != "ssp")) return;
  const auto optimizer = MakeOptimizer(setup.optimizer);
  problems.Check(!optimizer.ok() || !(*optimizer)->uses_trust_ratio(), "--optimizer=", setup.optimizer,
                 ": in --mode=", options.name,
                 " it needs --num_shards=1: its step depends on the norms of whole tensors, and the "
                 "servers' weights are never of the same pushes");
  problems.Check(!setup.clip.needs_norms() || mode != "asp" || options.delay_compensation == 0,
                 "--delay_compensation=", options.delay_compensation,
                 ": with --clip_norm or --clip_tensor_norm it needs --num_shards=1: a compensated "
                 "gradient depends on the weights, which differ between the shards in --mode=asp");
}

constexpr size_t kMaxShownBytes = 64;  // A message shows so much of a name from the wire.
constexpr int kMaxValues = 64;         // A request has no more.

const HyperparameterInfo* FindInfo(const std::vector<HyperparameterInfo>& table, const std::string& name) {
  const auto row = std::find_if(table.begin(), table.end(), [&](const auto& each) { return each.flag == name; });
  return row == table.end() ? nullptr : &*row;
}

// The rows that the optimizer and the outer one use; without an outer one, none of its.
std::vector<const HyperparameterInfo*> RowsOf(const std::string& optimizer, const std::string& outer) {
  std::vector<const HyperparameterInfo*> rows;
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    if (optimizer != kLocal && each.UsedBy(optimizer)) rows.push_back(&each);
  }
  if (outer.empty()) return rows;
  for (const HyperparameterInfo& each : OuterHyperparameterTable()) {
    if (each.UsedBy(outer)) rows.push_back(&each);
  }
  return rows;
}

// What values are for: what a job begins with, a change for all while it runs, or a group of tensors.
enum class Use { kStart, kChange, kGroup };

std::string Choices(const std::string& optimizer, const std::string& outer, Use use) {
  std::vector<std::string> names;
  for (const HyperparameterInfo* const each : RowsOf(optimizer, outer)) {
    if (each->may_change || use == Use::kStart) names.push_back(each->flag);
  }
  return absl::StrJoin(names, ", ");
}

std::string WhyNot(const std::string& name, const std::string& optimizer, const std::string& outer) {
  if (FindInfo(HyperparameterTable(), name) != nullptr) return absl::StrCat("not used by --optimizer=", optimizer);
  if (FindInfo(OuterHyperparameterTable(), name) == nullptr) return "there is no such hyperparameter";
  return outer.empty() ? "not used: the mode has no --outer_optimizer"
                       : absl::StrCat("not used by --outer_optimizer=", outer);
}

// A group may wait for its turn with a learning rate of 0; for all there is a base that a schedule multiplies.
HyperparameterRange RangeOf(const HyperparameterInfo& info, Use use) {
  if (use == Use::kGroup && info.field == &Hyperparameters::learning_rate) return {.low = 0};
  return info.range;
}

absl::StatusOr<HyperparameterValues> ValuesOf(const HyperparameterMessages& messages, const std::string& optimizer,
                                              const std::string& outer, Use use) {
  Problems problems;
  problems.Check(use != Use::kChange || !messages.empty(), "expected NAME=VALUE");
  problems.Check(messages.size() <= kMaxValues, "expected at most ", kMaxValues, " values");
  HyperparameterValues values;
  const std::vector<const HyperparameterInfo*> rows = RowsOf(optimizer, outer);
  for (int i = 0; i < std::min(messages.size(), kMaxValues); ++i) {
    const v1::Hyperparameter& message = messages[i];
    const std::string shown = absl::StrCat(Printable(message.name(), kMaxShownBytes), "=", ExactText(message.value()));
    const auto row =
        std::find_if(rows.begin(), rows.end(), [&](const auto* each) { return each->flag == message.name(); });
    if (row == rows.end()) {
      const std::string choices = Choices(optimizer, outer, use);
      problems.Check(false, shown, ": ", WhyNot(message.name(), optimizer, outer),
                     choices.empty() ? "" : absl::StrCat("; expected one of ", choices));
      continue;
    }
    const HyperparameterInfo* const info = *row;
    problems.Check(info->may_change || use == Use::kStart, shown, ": ",
                   use == Use::kGroup ? "is the same in all groups" : "cannot change while the job runs", ": it is ",
                   info->meaning);
    const HyperparameterRange range = RangeOf(*info, use);
    problems.Check(range.Contains(message.value()), shown, ": expected ", range.ToString());
    problems.Check(values.emplace(message.name(), message.value()).second, shown, ": ", message.name(),
                   " is given twice");
  }
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return values;
}

// The groups of a message, the first of which has this number; the numbers before it stand for nothing.
absl::StatusOr<GroupValues> GroupsOf(const GroupMessages& messages, size_t first, const std::string& optimizer) {
  const size_t count = first + static_cast<size_t>(messages.size());
  if (count > kMaxGroups + 1) {
    return InvalidArgument("there are ", count - 1, " groups; at most ", kMaxGroups, " are supported");
  }
  Problems problems;
  GroupValues groups(count);
  for (size_t group = first; group < count; ++group) {
    const HyperparameterMessages& values = messages[static_cast<int>(group - first)].hyperparameters();
    problems.Read(Annotate(ValuesOf(values, optimizer, /*outer=*/"", Use::kGroup), absl::StrCat("group ", group)),
                  groups[group]);
  }
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return groups;
}

// "group 1: beta1=0.8 (the job has 0.9), …", for what is not the same.
std::string DifferentGroups(const GroupValues& ours, const GroupValues& theirs, const std::string& who_has) {
  const auto value_in = [](const HyperparameterValues& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? std::string("none of its own") : ExactText(found->second);
  };
  std::vector<std::string> differences;
  for (size_t group = 1; group < std::max(ours.size(), theirs.size()); ++group) {
    const HyperparameterValues expected = group < ours.size() ? ours[group] : HyperparameterValues();
    const HyperparameterValues brought = group < theirs.size() ? theirs[group] : HyperparameterValues();
    HyperparameterValues names = brought;
    names.insert(expected.begin(), expected.end());
    for (const auto& [name, value] : names) {
      const std::string was = value_in(brought, name);
      const std::string wanted = value_in(expected, name);
      if (was == wanted) continue;
      differences.push_back(absl::StrCat("group ", group, ": ", name, "=", was, " (", who_has, " ", wanted, ")"));
    }
  }
  return absl::StrJoin(differences, ", ");
}

}  // namespace

OptimizerSetup MakeSetup(const std::string& optimizer, const Hyperparameters& hyperparameters, const ClipOptions& clip,
                         const ModeOptions& mode) {
  OptimizerSetup setup = {.optimizer = optimizer, .hyperparameters = hyperparameters, .clip = clip};
  const ModeOptions::Outer outer = mode.outer();
  setup.hyperparameters.outer_lr = outer.lr;
  setup.hyperparameters.outer_momentum = outer.momentum;
  if (CanonicalMode(mode.name) == "diloco") setup.outer = outer.optimizer;
  return setup;
}

std::unique_ptr<Optimizer> MakeOuter(const ModeOptions& mode, uint32_t num_workers) {
  const ModeOptions::Outer outer = mode.outer();
  if (CanonicalMode(mode.name) != "diloco" || mode.outer_sync != "async") return MakeOuterOptimizer(outer.optimizer);
  return MakeDelayedNesterov(mode.buffer(num_workers), /*momentum=*/outer.optimizer == "nesterov");
}

std::unique_ptr<Optimizer> MakeGradientOptimizer(const OptimizerSetup& setup) {
  const bool ours = setup.optimizer != kFromWorker && setup.optimizer != kLocal;
  return ours ? *MakeOptimizer(setup.optimizer) : MakeSgd();
}

std::string OptimizerFlagChoices() {
  return absl::StrCat(absl::StrJoin(OptimizerNames(), ", "), ", ", kFromWorker, " or ", kLocal);
}

void ValidateOptimizerSetup(const OptimizerSetup& setup, const ModeOptions& mode, uint32_t num_shards,
                            Problems& problems) {
  if (setup.optimizer == kFromWorker) return;
  if (setup.optimizer == kLocal) {
    problems.Check(!AppliesGradients(mode), "--optimizer=", kLocal, ": in --mode=", mode.name,
                   " servers apply gradients; it is for local_sgd, diloco and easgd, where workers do");
    return;
  }
  problems.Check(MakeOptimizer(setup.optimizer).ok(), "--optimizer=", setup.optimizer, ": expected ",
                 OptimizerFlagChoices());
  for (const HyperparameterInfo& each : HyperparameterTable()) problems.Check(each.Check(setup.hyperparameters));
  for (const ClipFlag& each : ClipFlags()) {
    const float limit = (setup.clip.*each.field).value_or(1);
    problems.Check(std::isfinite(limit) && limit > 0, "--", each.flag, "=", limit, ": expected a number above 0");
  }
  CheckNormsOverShards(setup, mode, num_shards, problems);
}

std::map<std::string, std::string> SettingsOf(const OptimizerSetup& setup) {
  if (setup.optimizer == kFromWorker || setup.optimizer == kLocal) return {{"optimizer", setup.optimizer}};
  std::map<std::string, std::string> settings = {{"optimizer", setup.optimizer}};
  for (const ClipFlag& each : ClipFlags()) {
    const std::optional<float> limit = setup.clip.*each.field;
    settings[each.flag] = limit.has_value() ? ExactText(*limit) : "none";
  }
  for (const auto& [name, value] : ValuesOf(setup.hyperparameters, setup.optimizer)) settings[name] = ExactText(value);
  return settings;
}

absl::StatusOr<OptimizerSetup> SetupOf(const v1::OptimizerSettings& message, const ModeOptions& mode,
                                       uint32_t num_shards) {
  Problems problems;
  if (message.optimizer() == kLocal) {
    const OptimizerSetup local = MakeSetup(kLocal, {}, {}, mode);
    ValidateOptimizerSetup(local, mode, num_shards, problems);
    if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
    return local;
  }
  if (const auto made = MakeOptimizer(message.optimizer()); !made.ok()) return made.status();
  OptimizerSetup setup = MakeSetup(message.optimizer(), DefaultHyperparameters(message.optimizer()), {}, mode);
  HyperparameterValues values;
  problems.Read(ValuesOf(message.hyperparameters(), setup.optimizer, /*outer=*/"", Use::kStart), values);
  setup.hyperparameters = Changed(setup.hyperparameters, values);
  problems.Read(GroupsOf(message.groups(), /*first=*/1, setup.optimizer), setup.groups);
  while (!setup.groups.empty() && setup.groups.back().empty()) setup.groups.pop_back();
  if (message.has_clip_value()) setup.clip.value = message.clip_value();
  if (message.has_clip_tensor_norm()) setup.clip.tensor_norm = message.clip_tensor_norm();
  if (message.has_clip_norm()) setup.clip.norm = message.clip_norm();
  ValidateOptimizerSetup(setup, mode, num_shards, problems);
  if (const absl::Status status = problems.ToStatus(); !status.ok()) return status;
  return setup;
}

v1::OptimizerSettings MessageOf(const OptimizerSetup& setup) {
  v1::OptimizerSettings message;
  message.set_optimizer(setup.optimizer);
  ToProto(ValuesOf(setup.hyperparameters, setup.optimizer), message.mutable_hyperparameters());
  if (setup.clip.value.has_value()) message.set_clip_value(*setup.clip.value);
  if (setup.clip.tensor_norm.has_value()) message.set_clip_tensor_norm(*setup.clip.tensor_norm);
  if (setup.clip.norm.has_value()) message.set_clip_norm(*setup.clip.norm);
  if (!setup.groups.empty()) ToProto({setup.groups.begin() + 1, setup.groups.end()}, message.mutable_groups());
  return message;
}

const std::vector<ClipFlag>& ClipFlags() {
  static const std::vector<ClipFlag> flags = {
      {.flag = "clip_value",
       .field = &ClipOptions::value,
       .help = "clips each element of a gradient to within plus and minus this; empty: not"},
      {.flag = "clip_tensor_norm",
       .field = &ClipOptions::tensor_norm,
       .help = "then scales the gradient of each tensor whose L2 norm is above this down to it; empty: not"},
      {.flag = "clip_norm",
       .field = &ClipOptions::norm,
       .help = "then scales the gradient down to this if its L2 norm over all tensors is above it; empty: not"}};
  return flags;
}

std::string ClipHelp(std::optional<float> ClipOptions::*field) {
  for (const ClipFlag& each : ClipFlags()) {
    if (each.field == field) return each.help;
  }
  return "";
}

absl::StatusOr<HyperparameterValues> CheckValues(const HyperparameterMessages& messages, const OptimizerSetup& setup) {
  return ValuesOf(messages, setup.optimizer, setup.outer, Use::kChange);
}

absl::Status CheckToldGroups(const GroupMessages& messages, const OptimizerSetup& setup) {
  const absl::StatusOr<GroupValues> groups = GroupsOf(messages, /*first=*/0, setup.optimizer);
  if (!groups.ok() || groups->empty()) return groups.status();
  const std::string& rate = InfoOf(&Hyperparameters::learning_rate).flag;
  if (!groups->front().contains(rate)) return absl::OkStatus();
  return InvalidArgument("group 0: ", rate, "=", groups->front().at(rate),
                         ": the learning rate of all is told by itself");
}

HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const std::string& optimizer) {
  return ValuesOf(hyperparameters, OptimizerSetup{.optimizer = optimizer});
}

HyperparameterValues ValuesOf(const Hyperparameters& hyperparameters, const OptimizerSetup& setup) {
  HyperparameterValues values;
  for (const HyperparameterInfo* const each : RowsOf(setup.optimizer, setup.outer)) {
    values[each->flag] = hyperparameters.*each->field;
  }
  return values;
}

std::string ToString(const HyperparameterValues& values, const std::optional<Schedule>& schedule) {
  const std::string text = absl::StrJoin(values, " ", [](std::string* out, const auto& each) {
    absl::StrAppend(out, each.first, "=", ExactText(each.second));
  });
  return schedule.has_value() ? absl::StrCat(text, values.empty() ? "" : " ", ToString(*schedule)) : text;
}

std::string ToString(const GroupValues& groups) {
  std::vector<std::string> texts;
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].empty()) continue;
    texts.push_back(absl::StrCat(group == 0 ? "all" : absl::StrCat("group ", group), ": ", ToString(groups[group])));
  }
  return absl::StrJoin(texts, "; ");
}

nlohmann::ordered_json ToJson(const HyperparameterValues& values) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const auto& [name, value] : values) json[name] = nlohmann::ordered_json::parse(ExactText(value));
  return json;
}

OptimizerTerms::OptimizerTerms(const OptimizerSetup& flags, ModeOptions mode, uint32_t num_shards, bool sparse)
    : mode_(std::move(mode)),
      num_shards_(num_shards),
      only_sgd_(sparse && AppliesGradients(mode_)),
      from_worker_(flags.optimizer == kFromWorker) {
  if (!from_worker_) setup_ = flags;
}

absl::Status OptimizerTerms::CheckSame(const v1::JoinRequest& request) const {
  if (!request.has_optimizer()) {
    if (!leaves_to_workers() && !from_worker_) return absl::OkStatus();
    return FailedPrecondition(
        "the servers ", from_worker_ ? "take the optimizer from" : "leave the optimizer to",
        " the workers (--optimizer=", from_worker_ ? kFromWorker : kLocal,
        "), but this worker brings none: start the servers with --optimizer=", OptimizerChoices());
  }
  const v1::OptimizerSettings& brought = request.optimizer();
  if (leaves_to_workers() || (!setup_.has_value() && brought.optimizer() == kLocal && !AppliesGradients(mode_))) {
    const bool clips = brought.has_clip_value() || brought.has_clip_tensor_norm() || brought.has_clip_norm();
    if (!clips) return absl::OkStatus();
    return FailedPrecondition("the worker's optimizer: the servers leave it to the worker (--optimizer=", kLocal,
                              "), so nobody clips gradients for it: clip them before the step");
  }
  PS_ASSIGN_OR_RETURN(const OptimizerSetup theirs,
                      Annotate(SetupOf(request.optimizer(), mode_, num_shards_), "the worker's optimizer"));
  if (from_worker_ && only_sgd_ && theirs.optimizer != "sgd") {
    return FailedPrecondition("the worker's optimizer is ", theirs.optimizer,
                              ": with --compress servers apply sgd; --momentum_correction has workers apply momentum");
  }
  if (!setup_.has_value()) return absl::OkStatus();
  std::map<std::string, std::string> ours = SettingsOf(*setup_);
  const std::map<std::string, std::string> other = SettingsOf(theirs);
  // Where the optimizers differ, only what both have is compared.
  std::erase_if(ours, [&](const auto& setting) { return !other.contains(setting.first); });
  const std::string who_has = from_worker_ ? "the job has" : "the servers have";
  std::string differences = DifferentSettings(ours, {other.begin(), other.end()}, who_has);
  const std::string groups = DifferentGroups(setup_->groups, theirs.groups, who_has);
  absl::StrAppend(&differences, differences.empty() || groups.empty() ? "" : ", ", groups);
  if (differences.empty()) return absl::OkStatus();
  return FailedPrecondition("the worker's optimizer differs from ",
                            from_worker_ ? "the job's: " : "the servers': ", differences,
                            groups.empty() || from_worker_ ? "" : "; flags give no group hyperparameters of its own");
}

bool OptimizerTerms::UsesNorms(const v1::JoinRequest& request) const {
  const auto setup = setup_.has_value() ? *setup_ : SetupOf(request.optimizer(), mode_, num_shards_);
  if (!setup.ok()) return false;
  const auto optimizer = MakeOptimizer(setup->optimizer);
  return setup->clip.needs_norms() || (optimizer.ok() && (*optimizer)->uses_trust_ratio());
}

void OptimizerTerms::Fix(const v1::JoinRequest& request) {
  if (!setup_.has_value()) setup_ = *SetupOf(request.optimizer(), mode_, num_shards_);
}

void OptimizerTerms::Reset() {
  if (from_worker_) setup_.reset();
}

}  // namespace ps
