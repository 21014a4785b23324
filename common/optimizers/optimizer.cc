#include "common/optimizers/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace ps {
namespace {

struct OptimizerEntry {
  const char* name;
  std::unique_ptr<Optimizer> (*make)();
};

constexpr OptimizerEntry kOptimizers[] = {
    {"sgd", MakeSgd},         {"momentum", MakeMomentum}, {"nesterov", MakeNesterov}, {"adagrad", MakeAdagrad},
    {"rmsprop", MakeRmsprop}, {"adam", MakeAdam},         {"adamw", MakeAdamW},       {"lamb", MakeLamb},
};

std::string Choices(const std::vector<std::string>& names) {
  const std::span<const std::string> all_but_last(names.begin(), names.end() - 1);
  return absl::StrCat(absl::StrJoin(all_but_last, ", "), " or ", names.back());
}

}  // namespace

float TrustRatio(const TrustSquares& squares) {
  if (squares.weights == 0 || squares.update == 0) return 1;
  const double ratio = std::sqrt(squares.weights) / std::sqrt(squares.update);
  return static_cast<float>(std::min<double>(ratio, std::numeric_limits<float>::max()));
}

std::vector<std::string> OptimizerNames() {
  std::vector<std::string> names;
  for (const OptimizerEntry& entry : kOptimizers) names.emplace_back(entry.name);
  return names;
}

std::string OptimizerChoices() { return Choices(OptimizerNames()); }

std::string OuterOptimizerChoices() { return Choices(OuterOptimizerNames()); }

absl::StatusOr<std::unique_ptr<Optimizer>> MakeOptimizer(const std::string& name) {
  for (const OptimizerEntry& entry : kOptimizers) {
    if (name == entry.name) return entry.make();
  }
  return InvalidArgument("--optimizer=", name, ": expected ", OptimizerChoices());
}

}  // namespace ps
