#include "common/optimizers/hyperparameters.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ps {

bool HyperparameterRange::Contains(float value) const {
  return std::isfinite(value) && (includes_low ? value >= low : value > low) && value < high;
}

std::string HyperparameterRange::ToString() const {
  return absl::StrCat(includes_low ? absl::StrCat(low, " or more") : absl::StrCat("a number above ", low),
                      std::isfinite(high) ? absl::StrCat(", below ", high) : "");
}

bool HyperparameterInfo::UsedBy(const std::string& optimizer) const {
  return optimizers.empty() || std::find(optimizers.begin(), optimizers.end(), optimizer) != optimizers.end();
}

std::string HyperparameterInfo::Help() const {
  return optimizers.empty() ? meaning : absl::StrCat(meaning, ", for --optimizer=", absl::StrJoin(optimizers, "|"));
}

absl::Status HyperparameterInfo::Check(const Hyperparameters& values) const {
  if (range.Contains(values.*field)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", values.*field, ": expected ", range.ToString()));
}

const std::vector<HyperparameterInfo>& HyperparameterTable() {
  static const std::vector<HyperparameterInfo> table = {
      {.flag = "learning_rate",
       .field = &Hyperparameters::learning_rate,
       .range = {.low = 0, .includes_low = false},
       .meaning = "learning rate"},
      {.flag = "momentum",
       .field = &Hyperparameters::momentum,
       .range = {.low = 0, .high = 1},
       .optimizers = {"momentum"},
       .meaning = "momentum"},
      {.flag = "weight_decay",
       .field = &Hyperparameters::weight_decay,
       .range = {.low = 0},
       .meaning = "weight decay (L2), added to the gradient"},
  };
  return table;
}

const HyperparameterInfo& InfoOf(float Hyperparameters::*field) {
  const std::vector<HyperparameterInfo>& table = HyperparameterTable();
  return *std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.field == field; });
}

Hyperparameters Changed(Hyperparameters hyperparameters, const HyperparameterValues& values) {
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    const auto value = values.find(each.flag);
    if (value != values.end()) hyperparameters.*each.field = value->second;
  }
  return hyperparameters;
}

}  // namespace ps
