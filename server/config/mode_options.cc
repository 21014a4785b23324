#include "server/config/mode_options.h"

#include <algorithm>
#include <functional>

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

// The options, and the number of workers that they are for.
struct Given {
  const ModeOptions& options;
  uint32_t num_workers = 1;
};

// A flag, the modes that use it, its value as text, and what it may be.
struct Row {
  std::string flag;
  std::vector<std::string> modes;  // Empty: all.
  std::function<std::string(const Given&)> text;
  std::function<void(const Given&, Problems&)> check;
  std::string local_sync;  // Only with this --local_sync, if set.

  bool UsedBy(const ModeOptions& options) const {
    const std::string mode = CanonicalMode(options.name);
    const bool named = modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
    return named && (mode != "local_sgd" || local_sync.empty() || options.local_sync == local_sync);
  }
};

// 0 or more, below `high`, which NaN is not.
void CheckBelow(const std::string& flag, float value, float high, Problems& problems) {
  problems.Check(value >= 0 && value < high,
                 absl::StrCat("--", flag, "=", value, ": expected 0 or more, below ", high));
}

void CheckChoice(const std::string& flag, const std::string& value, const std::string& one, const std::string& other,
                 Problems& problems) {
  problems.Check(value == one || value == other,
                 absl::StrCat("--", flag, "=", value, ": expected ", one, " or ", other));
}

void CheckLocalSteps(const Given& given, Problems& problems) {
  const ModeOptions& options = given.options;
  const bool may_be_never = CanonicalMode(options.name) == "local_sgd" && options.local_sync == "gradients";
  problems.CheckRange("local_steps", options.local_steps, may_be_never ? 0U : 1U, kMaxSteps);
}

void CheckAlpha(const Given& given, Problems& problems) {
  const float alpha = given.options.easgd_alpha;
  problems.Check(alpha >= 0 && static_cast<float>(given.num_workers) * given.options.alpha(given.num_workers) < 1,
                 absl::StrCat("--easgd_alpha=", alpha, ": expected more than 0 and less than 1 / --num_workers (",
                              given.num_workers, "), or 0 for 0.9 / --num_workers"));
}

const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
      {.flag = "on_worker_loss",
       .modes = {},
       .text = [](const Given& g) { return ToString(g.options.loss_action()); },
       .check =
           [](const Given& g, Problems& p) {
             const std::string& action = g.options.on_worker_loss;
             p.Check(action.empty() || ParseLossAction(action).has_value(),
                     absl::StrCat("--on_worker_loss=", action, ": expected fail, wait or continue"));
           }},
      {.flag = "max_staleness",
       .modes = {"asp"},
       .text =
           [](const Given& g) {
             return g.options.max_staleness.has_value() ? absl::StrCat(*g.options.max_staleness) : "none";
           },
       .check = [](const Given&, Problems&) {}},
      {.flag = "staleness_lr",
       .modes = {"asp"},
       .text = [](const Given& g) { return g.options.staleness_lr; },
       .check = [](const Given& g,
                   Problems& p) { CheckChoice("staleness_lr", g.options.staleness_lr, "none", "inverse", p); }},
      {.flag = "delay_compensation",
       .modes = {"asp"},
       .text = [](const Given& g) { return ExactText(g.options.delay_compensation); },
       .check = [](const Given& g,
                   Problems& p) { CheckBelow("delay_compensation", g.options.delay_compensation, 1e6F, p); }},
      {.flag = "staleness",
       .modes = {"ssp"},
       .text = [](const Given& g) { return absl::StrCat(g.options.staleness); },
       .check = [](const Given& g, Problems& p) { p.CheckRange("staleness", g.options.staleness, 0U, kMaxSteps); }},
      {.flag = "backup_workers",
       .modes = {"backup"},
       .text = [](const Given& g) { return absl::StrCat(g.options.backup_workers); },
       .check =
           [](const Given& g, Problems& p) {
             p.Check(g.options.backup_workers < g.num_workers,
                     absl::StrCat("--backup_workers=", g.options.backup_workers,
                                  ": expected less than --num_workers=", g.num_workers));
           }},
      {.flag = "local_steps",
       .modes = {"local_sgd", "easgd"},
       .text = [](const Given& g) { return absl::StrCat(g.options.local_steps); },
       .check = CheckLocalSteps},
      {.flag = "local_sync",
       .modes = {"local_sgd"},
       .text = [](const Given& g) { return g.options.local_sync; },
       .check = [](const Given& g,
                   Problems& p) { CheckChoice("local_sync", g.options.local_sync, "weights", "gradients", p); }},
      {.flag = "average_every",
       .modes = {"local_sgd"},
       .text = [](const Given& g) { return g.options.average_every; },
       .check = [](const Given& g, Problems& p) { p.Check(ParseAverageEvery(g.options.average_every).status()); },
       .local_sync = "gradients"},
      {.flag = "outer_momentum",
       .modes = {"local_sgd"},
       .text = [](const Given& g) { return ExactText(g.options.outer_momentum); },
       .check = [](const Given& g, Problems& p) { CheckBelow("outer_momentum", g.options.outer_momentum, 1, p); },
       .local_sync = "weights"},
      {.flag = "easgd_alpha",
       .modes = {"easgd"},
       .text = [](const Given& g) { return ExactText(g.options.alpha(g.num_workers)); },
       .check = CheckAlpha}};
  return rows;
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
  for (const Row& row : Rows()) {
    if (row.UsedBy(options)) row.check({options, num_workers}, problems);
  }
}

std::map<std::string, std::string> ModeSettings(const ModeOptions& options, uint32_t num_workers) {
  std::map<std::string, std::string> settings;
  for (const Row& row : Rows()) {
    if (row.UsedBy(options)) settings[row.flag] = row.text({options, num_workers});
  }
  return settings;
}

std::vector<ModeFlag> ModeFlags(const ModeOptions& options) {
  std::vector<ModeFlag> flags;
  const std::string mode = CanonicalMode(options.name);
  for (const Row& row : Rows()) {
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
