#include "common/optimizers/hyperparameters.h"

#include <fstream>
#include <iterator>
#include <limits>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_CASE("The table has each hyperparameter once, for optimizers that there are, with a default in its range") {
  const std::vector<std::string> names = OptimizerNames();
  const std::set<std::string> optimizers(names.begin(), names.end());
  std::set<std::string> flags;
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    INFO(each.flag);
    CHECK(flags.insert(each.flag).second);
    CHECK(InfoOf(each.field).flag == each.flag);
    for (const std::string& optimizer : each.optimizers) CHECK(optimizers.count(optimizer) == 1);
    for (const std::string& optimizer : names) CHECK(each.Check(DefaultHyperparameters(optimizer)).ok());
    for (const auto& [optimizer, value] : each.defaults) {
      CHECK(each.UsedBy(optimizer));
      CHECK(DefaultHyperparameters(optimizer).*each.field == value);
    }
    CHECK_FALSE(each.meaning.empty());
  }
  for (const HyperparameterInfo& each : OuterHyperparameterTable()) {
    INFO(each.flag);
    CHECK(flags.insert(each.flag).second);
    CHECK(InfoOf(each.field).flag == each.flag);
    CHECK(each.Check({}).ok());
  }
  // Hyperparameters has nothing but floats: a field without a row would be a flag that nobody checks.
  CHECK(flags.size() * sizeof(float) == sizeof(Hyperparameters));
}

TEST_CASE("A value out of a hyperparameter's range is refused with its flag and the range") {
  struct Bad {
    float Hyperparameters::*field;
    float value;
    const char* message;
  };
  const Bad bad[] = {
      {&Hyperparameters::learning_rate, 0, "--learning_rate=0: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::eps, 0x1p-127F, "--eps=5.87747e-39: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::learning_rate, -1, "--learning_rate=-1: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::learning_rate, kInfinity, "--learning_rate=inf: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::learning_rate, kNan, "--learning_rate=nan: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::momentum, 1, "--momentum=1: expected 0 or more, below 1"},
      {&Hyperparameters::momentum, -0.5F, "--momentum=-0.5: expected 0 or more, below 1"},
      {&Hyperparameters::momentum, kNan, "--momentum=nan: expected 0 or more, below 1"},
      {&Hyperparameters::weight_decay, -0.01F, "--weight_decay=-0.01: expected 0 or more"},
      {&Hyperparameters::weight_decay, kInfinity, "--weight_decay=inf: expected 0 or more"},
      {&Hyperparameters::weight_decay, kNan, "--weight_decay=nan: expected 0 or more"},
      {&Hyperparameters::beta1, 1, "--beta1=1: expected 0 or more, below 1"},
      {&Hyperparameters::beta2, -0.1F, "--beta2=-0.1: expected 0 or more, below 1"},
      {&Hyperparameters::beta2, kNan, "--beta2=nan: expected 0 or more, below 1"},
      {&Hyperparameters::alpha, 2, "--alpha=2: expected 0 or more, below 1"},
      {&Hyperparameters::eps, 0, "--eps=0: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::eps, kInfinity, "--eps=inf: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::initial_accumulator_value, -1, "--initial_accumulator_value=-1: expected 0 or more"},
      {&Hyperparameters::lr_decay, -1, "--lr_decay=-1: expected 0 or more"},
      {&Hyperparameters::outer_lr, 0, "--outer_lr=0: expected a number above 0 (at least 1.2e-38)"},
      {&Hyperparameters::outer_momentum, 1, "--outer_momentum=1: expected 0 or more, below 1"},
  };
  std::set<std::string> seen;
  for (const Bad& each : bad) {
    Hyperparameters values;
    values.*each.field = each.value;
    const absl::Status status = InfoOf(each.field).Check(values);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK(Message(status) == each.message);
    seen.insert(InfoOf(each.field).flag);
  }
  CHECK(seen.size() == HyperparameterTable().size() + OuterHyperparameterTable().size());
}

TEST_CASE("A range holds its lower end only if it includes it, and never its upper end") {
  const HyperparameterRange range = {.low = 0.25F, .includes_low = false, .high = 0.5F};
  CHECK_FALSE(range.Contains(0.25F));
  CHECK(range.Contains(0.375F));
  CHECK_FALSE(range.Contains(0.5F));
  CHECK(range.ToString() == "a number above 0.25, below 0.5");
}

TEST_CASE("Defaults are those of torch.optim, but for the learning rate of sgd and its kind") {
  CHECK(DefaultHyperparameters("sgd").learning_rate == 0.1F);
  CHECK(DefaultHyperparameters("nesterov").learning_rate == 0.1F);
  CHECK(DefaultHyperparameters("nesterov").momentum == 0.9F);
  CHECK(DefaultHyperparameters("adagrad").learning_rate == 0.01F);
  CHECK(DefaultHyperparameters("adagrad").eps == 1e-10F);
  CHECK(DefaultHyperparameters("rmsprop").learning_rate == 0.01F);
  CHECK(DefaultHyperparameters("rmsprop").alpha == 0.99F);
  CHECK(DefaultHyperparameters("rmsprop").eps == 1e-8F);
  CHECK(DefaultHyperparameters("adam").learning_rate == 0.001F);
  CHECK(DefaultHyperparameters("adam").weight_decay == 0);
  CHECK(DefaultHyperparameters("adam").beta1 == 0.9F);
  CHECK(DefaultHyperparameters("adam").beta2 == 0.999F);
  CHECK(DefaultHyperparameters("adamw").learning_rate == 0.001F);
  CHECK(DefaultHyperparameters("adamw").weight_decay == 0.01F);
}

// The page that README.md links to; empty where only the program is.
std::string OptimizersPage() {
  std::ifstream file(std::string(PS_TEST_DATA) + "/../../docs/optimizers.md");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST_CASE("The page on optimizers has each row of the table, and each optimizer with the bytes of its state") {
  const std::string page = OptimizersPage();
  if (page.empty()) PS_SKIP("docs/optimizers.md is not here");
  const auto has = [&](const std::string& line) { return page.find("\n" + line + "\n") != std::string::npos; };
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    const std::string row =
        absl::StrCat("| `--", each.flag, "` | ", each.optimizers.empty() ? "all" : absl::StrJoin(each.optimizers, ", "),
                     " | ", each.Defaults(), " | ", each.range.ToString(), " | ", each.meaning, " |");
    INFO(row);
    CHECK(has(row));
  }
  for (const std::string& name : OptimizerNames()) {
    INFO(name);
    const size_t begin = page.find("\n| `" + name + "` | ");
    REQUIRE(begin != std::string::npos);
    const std::string row = page.substr(begin + 1, page.find('\n', begin + 1) - begin - 1);
    const auto optimizer = *MakeOptimizer(name);
    const int state = optimizer->state_tensors() * 4;
    const int measured = optimizer->uses_trust_ratio() ? 8 + state : 0;  // Gradient, weights and state, read before.
    const std::string bytes = absl::StrCat(" | ", state, " | ", 12 + 2 * state + measured, " |");
    CHECK(row.rfind(bytes) == row.size() - bytes.size());
  }
}

TEST_CASE("Help says which optimizers a hyperparameter is for, unless it is for all, and what its defaults are") {
  const HyperparameterInfo all = {.flag = "rate", .field = &Hyperparameters::learning_rate, .meaning = "how far"};
  CHECK(all.UsedBy("sgd"));
  CHECK(all.Help() == "how far; default: 0.1");
  const HyperparameterInfo some = {.flag = "beta",
                                   .field = &Hyperparameters::eps,
                                   .optimizers = {"adam", "b", "c", "lamb"},
                                   .defaults = {{"lamb", 1e-6F}, {"b", 0.5F}, {"c", 0.5F}},
                                   .meaning = "how slowly"};
  CHECK(some.UsedBy("lamb"));
  CHECK_FALSE(some.UsedBy("sgd"));
  CHECK(some.DefaultOf("lamb") == 1e-6F);
  CHECK(some.DefaultOf("adam") == 1e-8F);
  CHECK(some.Help() == "how slowly, for --optimizer=adam|b|c|lamb; default: 1e-08; 1e-06 of lamb; 0.5 of b, c");
}

}  // namespace
}  // namespace ps
