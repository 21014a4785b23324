#include "common/optimizers/hyperparameters.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "common/text.h"

namespace ps {

bool HyperparameterRange::Contains(float value) const {
  return std::isfinite(value) && (includes_low ? value >= low : value > low && std::isnormal(value)) && value < high;
}

std::string HyperparameterRange::ToString() const {
  return absl::StrCat(includes_low ? absl::StrCat(low, " or more")
                                   : absl::StrCat("a number above ", low, low == 0 ? " (at least 1.2e-38)" : ""),
                      std::isfinite(high) ? absl::StrCat(", below ", high) : "");
}

bool HyperparameterInfo::UsedBy(const std::string& optimizer) const {
  return optimizers.empty() || std::find(optimizers.begin(), optimizers.end(), optimizer) != optimizers.end();
}

float HyperparameterInfo::DefaultOf(const std::string& optimizer) const {
  const auto own = defaults.find(optimizer);
  return own == defaults.end() ? Hyperparameters{}.*field : own->second;
}

std::string HyperparameterInfo::Defaults() const {
  std::map<float, std::vector<std::string>> of;
  for (const auto& [optimizer, value] : defaults) of[value].push_back(optimizer);
  std::string text = ExactText(Hyperparameters{}.*field);
  for (const auto& [value, names] : of) {
    absl::StrAppend(&text, "; ", ExactText(value), " of ", absl::StrJoin(names, ", "));
  }
  return text;
}

std::string HyperparameterInfo::Help() const {
  return absl::StrCat(meaning, optimizers.empty() ? "" : ", for --optimizer=" + absl::StrJoin(optimizers, "|"),
                      "; default: ", Defaults());
}

absl::Status HyperparameterInfo::Check(const Hyperparameters& values) const {
  if (range.Contains(values.*field)) return absl::OkStatus();
  return InvalidArgument("--", flag, "=", values.*field, ": expected ", range.ToString());
}

const std::vector<HyperparameterInfo>& HyperparameterTable() {
  static const std::vector<HyperparameterInfo> table = {
      {.flag = "learning_rate",
       .field = &Hyperparameters::learning_rate,
       .range = {.low = 0, .includes_low = false},
       .defaults = {{"adagrad", 0.01F}, {"rmsprop", 0.01F}, {"adam", 0.001F}, {"adamw", 0.001F}, {"lamb", 0.001F}},
       .meaning = "learning rate"},
      {.flag = "weight_decay",
       .field = &Hyperparameters::weight_decay,
       .range = {.low = 0},
       .defaults = {{"adamw", 0.01F}},
       .meaning = "weight decay: added to the gradient (L2); adamw takes it, times the learning rate, off the weights, "
                  "and lamb has it in its update"},
      {.flag = "momentum",
       .field = &Hyperparameters::momentum,
       .range = {.low = 0, .high = 1},
       .optimizers = {"momentum", "nesterov"},
       .meaning = "momentum"},
      {.flag = "beta1",
       .field = &Hyperparameters::beta1,
       .range = {.low = 0, .high = 1},
       .optimizers = {"adam", "adamw", "lamb"},
       .meaning = "how much of the gradients' running mean is kept"},
      {.flag = "beta2",
       .field = &Hyperparameters::beta2,
       .range = {.low = 0, .high = 1},
       .optimizers = {"adam", "adamw", "lamb"},
       .meaning = "how much of the squared gradients' running mean is kept"},
      {.flag = "alpha",
       .field = &Hyperparameters::alpha,
       .range = {.low = 0, .high = 1},
       .optimizers = {"rmsprop"},
       .meaning = "how much of the squared gradients' running mean is kept"},
      {.flag = "eps",
       .field = &Hyperparameters::eps,
       .range = {.low = 0, .includes_low = false},
       .optimizers = {"adagrad", "rmsprop", "adam", "adamw", "lamb"},
       .defaults = {{"adagrad", 1e-10F}, {"lamb", 1e-6F}},
       .meaning = "added to the root of the squared gradients before it divides"},
      {.flag = "initial_accumulator_value",
       .field = &Hyperparameters::initial_accumulator_value,
       .range = {.low = 0},
       .optimizers = {"adagrad"},
       .meaning = "what the sum of squared gradients begins with",
       .may_change = false},
      {.flag = "lr_decay",
       .field = &Hyperparameters::lr_decay,
       .range = {.low = 0},
       .optimizers = {"adagrad"},
       .meaning = "update t steps with the learning rate divided by 1 + (t - 1) times this"},
  };
  return table;
}

const std::vector<HyperparameterInfo>& OuterHyperparameterTable() {
  static const std::vector<HyperparameterInfo> table = {
      {.flag = "outer_lr",
       .field = &Hyperparameters::outer_lr,
       .range = {.low = 0, .includes_low = false},
       .meaning = "learning rate of the outer optimizer"},
      {.flag = "outer_momentum",
       .field = &Hyperparameters::outer_momentum,
       .range = {.low = 0, .high = 1},
       .optimizers = {"momentum", "nesterov"},
       .meaning = "momentum of the outer optimizer"},
  };
  return table;
}

const HyperparameterInfo& InfoOf(float Hyperparameters::*field) {
  const auto in = [&](const std::vector<HyperparameterInfo>& table) {
    return std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.field == field; });
  };
  const auto own = in(HyperparameterTable());
  return own == HyperparameterTable().end() ? *in(OuterHyperparameterTable()) : *own;
}

Hyperparameters DefaultHyperparameters(const std::string& optimizer) {
  Hyperparameters values;
  for (const HyperparameterInfo& each : HyperparameterTable()) values.*each.field = each.DefaultOf(optimizer);
  return values;
}

Hyperparameters Changed(Hyperparameters hyperparameters, const HyperparameterValues& values) {
  for (const auto* const table : {&HyperparameterTable(), &OuterHyperparameterTable()}) {
    for (const HyperparameterInfo& each : *table) {
      const auto value = values.find(each.flag);
      if (value != values.end()) hyperparameters.*each.field = value->second;
    }
  }
  return hyperparameters;
}

HyperparameterValues AllValues(const Hyperparameters& hyperparameters) {
  HyperparameterValues values;
  for (const auto* const table : {&HyperparameterTable(), &OuterHyperparameterTable()}) {
    for (const HyperparameterInfo& each : *table) values[each.flag] = hyperparameters.*each.field;
  }
  return values;
}

Hyperparameters ForTensor(Hyperparameters hyperparameters, const TensorSpec& tensor) {
  hyperparameters.learning_rate *= tensor.learning_rate_factor;
  hyperparameters.weight_decay *= tensor.weight_decay_factor;
  return hyperparameters;
}

}  // namespace ps
