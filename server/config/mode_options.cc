#include "server/config/mode_options.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "common/optimizers/hyperparameters.h"
#include "common/optimizers/optimizer.h"
#include "common/slices.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr uint32_t kMaxSteps = 1'000'000;  // Local ones, and of staleness.
constexpr uint64_t kMaxAverageSteps = 1ULL << 40;
constexpr double kMaxAverageEpochs = 1e6;

constexpr const char* kLossActions[] = {"fail", "wait", "continue"};  // By LossAction.

std::optional<LossAction> ParseLossAction(const std::string& text) {
  for (const LossAction action : {LossAction::kFail, LossAction::kWait, LossAction::kContinue}) {
    if (text == ToString(action)) return action;
  }
  return std::nullopt;
}

constexpr uint32_t kMaxBuffer = 1'000'000;
constexpr std::chrono::hours kMaxGrace(1);

// In this mode a row's flag has an effect only where another flag has one of some values.
struct Need {
  std::string mode;
  std::string flag;                   // The other one,
  std::string value;                  // what it is set to,
  std::vector<std::string> accepted;  // and what it has to be set to.

  bool met() const { return std::find(accepted.begin(), accepted.end(), value) != accepted.end(); }
};

// A flag, the modes that use it, its value as text, and what is wrong with that.
struct Row {
  std::string flag;
  std::vector<std::string> modes;  // Empty: all.
  std::string text;
  absl::Status check;
  std::vector<Need> needs = {};

  // What keeps the mode, which is one of the row's, from using the flag; null: nothing does.
  const Need* Unmet(const std::string& mode) const {
    const auto unmet =
        std::find_if(needs.begin(), needs.end(), [&](const Need& each) { return each.mode == mode && !each.met(); });
    return unmet == needs.end() ? nullptr : &*unmet;
  }
  bool IsOf(const std::string& mode) const {
    return modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
  }
  bool UsedBy(const ModeOptions& options) const {
    const std::string mode = CanonicalMode(options.name);
    return IsOf(mode) && Unmet(mode) == nullptr;
  }
};

template <typename... Parts>
absl::Status OkIf(bool good, const Parts&... problem) {
  return good ? absl::OkStatus() : InvalidArgument(problem...);
}

// 0 or more, below `high`, which NaN is not.
absl::Status CheckBelow(const std::string& flag, float value, float high) {
  return OkIf(value >= 0 && value < high, "--", flag, "=", value, ": expected 0 or more, below ", high);
}

absl::Status CheckChoice(const std::string& flag, const std::string& value, const std::string& one,
                         const std::string& other) {
  return OkIf(value == one || value == other, "--", flag, "=", value, ": expected ", one, " or ", other);
}

absl::Status CheckOuter(float Hyperparameters::*field, float value) {
  Hyperparameters values;
  values.*field = value;
  return InfoOf(field).Check(values);
}

absl::Status CheckOuterOptimizer(const ModeOptions& o) {
  const bool async = o.outer_sync == "async";
  const std::vector<std::string> names = async ? std::vector<std::string>{"sgd", "nesterov"} : OuterOptimizerNames();
  return OkIf(std::find(names.begin(), names.end(), o.outer_optimizer) != names.end(),
              "--outer_optimizer=", o.outer_optimizer, ": expected ",
              async ? "sgd or nesterov, with --outer_sync=async" : OuterOptimizerChoices());
}

absl::Status CheckCount(const std::string& flag, uint32_t value, uint32_t least, uint32_t most) {
  Problems problems;
  problems.CheckRange(flag, value, least, most);
  return problems.ToStatus();
}

absl::Status CheckSteps(const std::string& flag, uint32_t value, uint32_t least) {
  return CheckCount(flag, value, least, kMaxSteps);
}

// P divides H, and an exchange ends before the next begins.
absl::Status CheckFragments(const ModeOptions& o) {
  const uint32_t steps = o.batches_per_round();
  return OkIf(o.fragments >= 1 && o.fragments <= kMaxFragments && steps % o.fragments == 0, "--fragments=", o.fragments,
              ": expected 1 to ", kMaxFragments, ", of which --local_steps=", steps, " is a multiple");
}

absl::Status CheckOuterSync(const std::string& sync) {
  return OkIf(sync == "barrier" || sync == "quorum" || sync == "async", "--outer_sync=", sync,
              ": expected barrier, quorum or async");
}

absl::Status CheckQuorum(uint32_t quorum, uint32_t num_workers) {
  return OkIf(quorum >= 1 && quorum <= num_workers, "--quorum=", quorum,
              ": with --outer_sync=quorum, expected how many of the job's ", num_workers, " workers make a round");
}

absl::Status CheckGrace(const ModeOptions& o) {
  PS_ASSIGN_OR_RETURN(const auto grace, ParseGrace(o.grace));
  return OkIf(grace.has_value() || o.overlap > 0,
              "--quorum_grace=auto: it is a part of the time that --overlap hides, which is 0");
}

// The same for all ways to write it.
std::string GraceText(const std::string& text) {
  const auto grace = ParseGrace(text);
  return grace.ok() && grace->has_value() ? absl::FormatDuration(absl::FromChrono(**grace)) : text;
}

absl::Status CheckOverlap(const ModeOptions& o) {
  const uint32_t between = o.batches_per_round() / std::max(o.fragments, 1U);
  return OkIf(o.overlap < std::max(between, 1U), "--overlap=", o.overlap,
              ": expected less than --local_steps / --fragments (", between, ")");
}

std::vector<Row> Rows(const ModeOptions& o, uint32_t num_workers) {
  const bool averages_gradients = CanonicalMode(o.name) == "local_sgd" && o.local_sync == "gradients";
  const float alpha = o.alpha(num_workers);
  const ModeOptions::Outer outer = o.outer();
  const Need averages_weights = {"local_sgd", "local_sync", o.local_sync, {"weights"}};
  const Need has_momentum = {"diloco", "outer_optimizer", o.outer_optimizer, {"momentum", "nesterov"}};
  return {
      {"on_worker_loss",
       {},
       ToString(o.loss_action()),
       OkIf(o.on_worker_loss.empty() || ParseLossAction(o.on_worker_loss).has_value(),
            "--on_worker_loss=", o.on_worker_loss, ": expected fail, wait or continue")},
      {"lr_scale",
       {"bsp", "backup"},
       o.lr_scale,
       OkIf(o.lr_scale == "none" || o.lr_scale == "linear" || o.lr_scale == "sqrt", "--lr_scale=", o.lr_scale,
            ": expected none, linear or sqrt")},
      {"max_staleness", {"asp"}, o.max_staleness.has_value() ? absl::StrCat(*o.max_staleness) : "none", {}},
      {"staleness_lr", {"asp"}, o.staleness_lr, CheckChoice("staleness_lr", o.staleness_lr, "none", "inverse")},
      {"delay_compensation",
       {"asp"},
       ExactText(o.delay_compensation),
       CheckBelow("delay_compensation", o.delay_compensation, 1e6F)},
      {"staleness", {"ssp"}, absl::StrCat(o.staleness), CheckSteps("staleness", o.staleness, 0)},
      {"backup_workers",
       {"backup"},
       absl::StrCat(o.backup_workers),
       OkIf(o.backup_workers < num_workers, "--backup_workers=", o.backup_workers,
            ": expected less than the job's workers (", num_workers, ")")},
      {"local_steps",
       {"local_sgd", "diloco", "easgd"},
       absl::StrCat(o.batches_per_round()),
       CheckSteps("local_steps", o.batches_per_round(), averages_gradients ? 0 : 1)},  // 0: they are never averaged.
      {"local_sync", {"local_sgd"}, o.local_sync, CheckChoice("local_sync", o.local_sync, "weights", "gradients")},
      {"average_every",
       {"local_sgd"},
       o.average_every,
       ParseAverageEvery(o.average_every).status(),
       {{"local_sgd", "local_sync", o.local_sync, {"gradients"}}}},
      {"outer_optimizer", {"diloco"}, o.outer_optimizer, CheckOuterOptimizer(o)},
      {"outer_lr", {"diloco"}, ExactText(outer.lr), CheckOuter(&Hyperparameters::outer_lr, outer.lr)},
      {"outer_momentum",
       {"local_sgd", "diloco"},
       ExactText(outer.momentum),
       CheckOuter(&Hyperparameters::outer_momentum, outer.momentum),
       {averages_weights, has_momentum}},
      {"outer_sync", {"diloco"}, o.outer_sync, CheckOuterSync(o.outer_sync)},
      {"outer_weighting",
       {"diloco"},
       o.outer_weighting,
       CheckChoice("outer_weighting", o.outer_weighting, "samples", "uniform"),
       {{"diloco", "outer_sync", o.outer_sync, {"barrier", "quorum"}}}},
      {"quorum",
       {"diloco"},
       absl::StrCat(o.quorum),
       CheckQuorum(o.quorum, num_workers),
       {{"diloco", "outer_sync", o.outer_sync, {"quorum"}}}},
      {"quorum_grace",
       {"diloco"},
       GraceText(o.grace),
       CheckGrace(o),
       {{"diloco", "outer_sync", o.outer_sync, {"quorum"}}}},
      {"dn_buffer",
       {"diloco"},
       absl::StrCat(o.buffer(num_workers)),
       CheckCount("dn_buffer", o.buffer(num_workers), 1, kMaxBuffer),
       {{"diloco", "outer_sync", o.outer_sync, {"async"}}}},
      {"fragments", {"diloco"}, absl::StrCat(o.fragments), CheckFragments(o)},
      {"overlap", {"diloco"}, absl::StrCat(o.overlap), CheckOverlap(o)},
      {"mix", {"diloco"}, ExactText(o.mix), OkIf(o.mix >= 0 && o.mix <= 1, "--mix=", o.mix, ": expected 0 to 1")},
      {"easgd_alpha",
       {"easgd"},
       ExactText(alpha),
       OkIf(o.easgd_alpha >= 0 && static_cast<float>(num_workers) * alpha < 1, "--easgd_alpha=", o.easgd_alpha,
            ": expected more than 0 and less than 1 / the number of workers (", num_workers,
            "), or 0 for 0.9 of that")}};
}

}  // namespace

absl::StatusOr<AverageEvery> ParseAverageEvery(const std::string& text) {
  AverageEvery every;
  absl::string_view number = text;
  const bool epochs = absl::ConsumeSuffix(&number, "epochs") || absl::ConsumeSuffix(&number, "epoch");
  const bool good =
      epochs ? absl::SimpleAtod(number, &every.epochs) && every.epochs > 0 && every.epochs <= kMaxAverageEpochs
             : absl::SimpleAtoi(number, &every.steps) && every.steps > 0 && every.steps <= kMaxAverageSteps;
  if (good) return every;
  return InvalidArgument(
      "--average_every=", text,
      ": with --local_sync=gradients, expected after how many batches weights are averaged, as in 200 or 0.5epochs");
}

absl::StatusOr<std::optional<std::chrono::nanoseconds>> ParseGrace(const std::string& text) {
  if (text == "auto") return std::nullopt;
  absl::Duration grace;
  if (absl::ParseDuration(text, &grace) && grace >= absl::ZeroDuration() && grace <= absl::FromChrono(kMaxGrace)) {
    return absl::ToChronoNanoseconds(grace);
  }
  return InvalidArgument("--quorum_grace=", text, ": expected auto or a time from 0s to 1h, as in 500ms or 2s");
}

std::string ToString(LossAction action) { return kLossActions[static_cast<int>(action)]; }

LossAction ModeOptions::loss_action() const {
  if (const std::optional<LossAction> chosen = ParseLossAction(on_worker_loss); chosen.has_value()) return *chosen;
  const std::string mode = CanonicalMode(name);
  const bool all_wait = mode == "bsp" || mode == "local_sgd" || (mode == "diloco" && outer_sync == "barrier");
  return all_wait ? LossAction::kFail : LossAction::kContinue;
}

uint32_t ModeOptions::batches_per_round() const {
  return local_steps.value_or(CanonicalMode(name) == "diloco" ? 500 : 8);
}

ModeOptions::Outer ModeOptions::outer() const {
  const std::string mode = CanonicalMode(name);
  if (mode == "diloco") {
    const bool has_momentum = outer_optimizer == "momentum" || outer_optimizer == "nesterov";
    return {.optimizer = outer_optimizer,
            .lr = outer_lr.value_or(0.7F),
            .momentum = has_momentum ? outer_momentum.value_or(0.9F) : 0.0F};
  }
  const float momentum = mode == "local_sgd" && local_sync == "weights" ? outer_momentum.value_or(0.0F) : 0.0F;
  return {.optimizer = momentum > 0 ? "nesterov" : "sgd", .momentum = momentum};
}

float ModeOptions::alpha(uint32_t num_workers) const {
  return easgd_alpha > 0 ? easgd_alpha : 0.9F / static_cast<float>(num_workers);
}

std::string CanonicalMode(const std::string& mode) {
  if (mode == "sync") return "bsp";
  if (mode == "async") return "asp";
  return mode;
}

bool AppliesGradients(const ModeOptions& options) {
  const std::string mode = CanonicalMode(options.name);
  return mode != "easgd" && mode != "diloco" && (mode != "local_sgd" || options.local_sync == "gradients");
}

void ValidateModeOptions(const ModeOptions& options, uint32_t num_workers, Problems& problems) {
  const std::string mode = CanonicalMode(options.name);
  const std::vector<std::string> modes = {"bsp", "asp", "ssp", "backup", "local_sgd", "diloco", "easgd"};
  problems.Check(std::find(modes.begin(), modes.end(), mode) != modes.end(), "--mode=", options.name,
                 ": expected bsp (sync), asp (async), ssp, backup, local_sgd, diloco or easgd");
  for (const Row& row : Rows(options, num_workers)) {
    if (row.UsedBy(options)) problems.Check(row.check);
  }
}

std::map<std::string, std::string> ModeSettings(const ModeOptions& options, uint32_t num_workers) {
  std::map<std::string, std::string> settings;
  for (const Row& row : Rows(options, num_workers)) {
    if (row.UsedBy(options)) settings[row.flag] = row.text;
  }
  return settings;
}

std::vector<ModeFlag> ModeFlags(const ModeOptions& options) {
  std::vector<ModeFlag> flags;
  const std::string mode = CanonicalMode(options.name);
  for (const Row& row : Rows(options, /*num_workers=*/1)) {
    const Need* const unmet = row.IsOf(mode) ? row.Unmet(mode) : nullptr;
    flags.push_back(
        {.flag = row.flag,
         .used = row.UsedBy(options),
         .why_not = absl::StrCat("--mode=", options.name,
                                 unmet == nullptr ? "" : absl::StrCat(" --", unmet->flag, "=", unmet->value),
                                 " has no ", row.flag)});
  }
  return flags;
}

}  // namespace ps
