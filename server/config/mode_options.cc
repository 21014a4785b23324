#include "server/config/mode_options.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/text.h"

namespace ps {
namespace {

constexpr uint32_t kMaxSteps = 1'000'000;  // Local ones, and of staleness.
constexpr uint64_t kMaxAverageSteps = 1ULL << 40;
constexpr double kMaxAverageEpochs = 1e6;

std::optional<LossAction> ParseLossAction(const std::string& text) {
  for (const LossAction action : {LossAction::kFail, LossAction::kWait, LossAction::kContinue}) {
    if (text == ToString(action)) return action;
  }
  return std::nullopt;
}

// A flag, the modes that use it, its value as text, and what is wrong with that.
struct Row {
  std::string flag;
  std::vector<std::string> modes;  // Empty: all.
  std::string text;
  absl::Status check;
  std::string local_sync = {};  // Only with this --local_sync, if set.

  bool UsedBy(const ModeOptions& options) const {
    const std::string mode = CanonicalMode(options.name);
    const bool named = modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
    return named && (mode != "local_sgd" || local_sync.empty() || options.local_sync == local_sync);
  }
};

absl::Status OkIf(bool good, const std::string& problem) {
  return good ? absl::OkStatus() : absl::InvalidArgumentError(problem);
}

// 0 or more, below `high`, which NaN is not.
absl::Status CheckBelow(const std::string& flag, float value, float high) {
  return OkIf(value >= 0 && value < high, absl::StrCat("--", flag, "=", value, ": expected 0 or more, below ", high));
}

absl::Status CheckChoice(const std::string& flag, const std::string& value, const std::string& one,
                         const std::string& other) {
  return OkIf(value == one || value == other, absl::StrCat("--", flag, "=", value, ": expected ", one, " or ", other));
}

absl::Status CheckSteps(const std::string& flag, uint32_t value, uint32_t least) {
  Problems problems;
  problems.CheckRange(flag, value, least, kMaxSteps);
  return problems.ToStatus();
}

std::vector<Row> Rows(const ModeOptions& o, uint32_t num_workers) {
  const bool averages_gradients = CanonicalMode(o.name) == "local_sgd" && o.local_sync == "gradients";
  const float alpha = o.alpha(num_workers);
  return {
      {"on_worker_loss",
       {},
       ToString(o.loss_action()),
       OkIf(o.on_worker_loss.empty() || ParseLossAction(o.on_worker_loss).has_value(),
            absl::StrCat("--on_worker_loss=", o.on_worker_loss, ": expected fail, wait or continue"))},
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
       OkIf(o.backup_workers < num_workers,
            absl::StrCat("--backup_workers=", o.backup_workers, ": expected less than --num_workers=", num_workers))},
      {"local_steps",
       {"local_sgd", "easgd"},
       absl::StrCat(o.local_steps),
       CheckSteps("local_steps", o.local_steps, averages_gradients ? 0 : 1)},  // 0: they are never averaged.
      {"local_sync", {"local_sgd"}, o.local_sync, CheckChoice("local_sync", o.local_sync, "weights", "gradients")},
      {"average_every", {"local_sgd"}, o.average_every, ParseAverageEvery(o.average_every).status(), "gradients"},
      {"outer_momentum",
       {"local_sgd"},
       ExactText(o.outer_momentum),
       CheckBelow("outer_momentum", o.outer_momentum, 1),
       "weights"},
      {"easgd_alpha",
       {"easgd"},
       ExactText(alpha),
       OkIf(o.easgd_alpha >= 0 && static_cast<float>(num_workers) * alpha < 1,
            absl::StrCat("--easgd_alpha=", o.easgd_alpha, ": expected more than 0 and less than 1 / --num_workers (",
                         num_workers, "), or 0 for 0.9 / --num_workers"))}};
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
  return absl::InvalidArgumentError(absl::StrCat(
      "--average_every=", text,
      ": with --local_sync=gradients, expected after how many batches weights are averaged, as in 200 or 0.5epochs"));
}

std::string ToString(LossAction action) {
  switch (action) {
    case LossAction::kFail:
      return "fail";
    case LossAction::kWait:
      return "wait";
    case LossAction::kContinue:
      break;
  }
  return "continue";
}

LossAction ModeOptions::loss_action() const {
  if (const std::optional<LossAction> chosen = ParseLossAction(on_worker_loss); chosen.has_value()) return *chosen;
  const std::string mode = CanonicalMode(name);
  return mode == "bsp" || mode == "local_sgd" ? LossAction::kFail : LossAction::kContinue;
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
  return mode != "easgd" && (mode != "local_sgd" || options.local_sync == "gradients");
}

void ValidateModeOptions(const ModeOptions& options, uint32_t num_workers, Problems& problems) {
  const std::string mode = CanonicalMode(options.name);
  const std::vector<std::string> modes = {"bsp", "asp", "ssp", "backup", "local_sgd", "easgd"};
  problems.Check(
      std::find(modes.begin(), modes.end(), mode) != modes.end(),
      absl::StrCat("--mode=", options.name, ": expected bsp (sync), asp (async), ssp, backup, local_sgd or easgd"));
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
    const bool by_sync =
        mode == "local_sgd" && !row.modes.empty() && row.modes.front() == "local_sgd" && !row.local_sync.empty();
    flags.push_back({.flag = row.flag,
                     .used = row.UsedBy(options),
                     .why_not = absl::StrCat("--mode=", options.name,
                                             by_sync ? absl::StrCat(" --local_sync=", options.local_sync) : "",
                                             " has no ", row.flag)});
  }
  return flags;
}

}  // namespace ps
