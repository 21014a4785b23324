#include "common/optimizers/hyperparameters.h"

#include <limits>
#include <set>

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
    CHECK(each.Check({}).ok());
    CHECK_FALSE(each.meaning.empty());
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
      {&Hyperparameters::learning_rate, 0, "--learning_rate=0: expected a number above 0"},
      {&Hyperparameters::learning_rate, -1, "--learning_rate=-1: expected a number above 0"},
      {&Hyperparameters::learning_rate, kInfinity, "--learning_rate=inf: expected a number above 0"},
      {&Hyperparameters::learning_rate, kNan, "--learning_rate=nan: expected a number above 0"},
      {&Hyperparameters::momentum, 1, "--momentum=1: expected 0 or more, below 1"},
      {&Hyperparameters::momentum, -0.5F, "--momentum=-0.5: expected 0 or more, below 1"},
      {&Hyperparameters::momentum, kNan, "--momentum=nan: expected 0 or more, below 1"},
      {&Hyperparameters::weight_decay, -0.01F, "--weight_decay=-0.01: expected 0 or more"},
      {&Hyperparameters::weight_decay, kInfinity, "--weight_decay=inf: expected 0 or more"},
      {&Hyperparameters::weight_decay, kNan, "--weight_decay=nan: expected 0 or more"},
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
  CHECK(seen.size() == HyperparameterTable().size());
}

TEST_CASE("A range holds its lower end only if it includes it, and never its upper end") {
  const HyperparameterRange range = {.low = 0.25F, .includes_low = false, .high = 0.5F};
  CHECK_FALSE(range.Contains(0.25F));
  CHECK(range.Contains(0.375F));
  CHECK_FALSE(range.Contains(0.5F));
  CHECK(range.ToString() == "a number above 0.25, below 0.5");
}

TEST_CASE("Help says which optimizers a hyperparameter is for, unless it is for all") {
  const HyperparameterInfo all = {.flag = "rate", .meaning = "how far"};
  CHECK(all.UsedBy("sgd"));
  CHECK(all.Help() == "how far");
  const HyperparameterInfo two = {.flag = "beta", .optimizers = {"adam", "lamb"}, .meaning = "how slowly"};
  CHECK(two.UsedBy("lamb"));
  CHECK_FALSE(two.UsedBy("sgd"));
  CHECK(two.Help() == "how slowly, for --optimizer=adam|lamb");
}

}  // namespace
}  // namespace ps
