#include "server/engine/hyperparameter_timeline.h"

#include <algorithm>
#include <limits>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using Change = HyperparameterTimeline::Change;

HyperparameterMessages Messages(const std::vector<std::pair<std::string, float>>& values) {
  HyperparameterMessages messages;
  for (const auto& [name, value] : values) {
    messages.Add()->set_name(name);
    messages[messages.size() - 1].set_value(value);
  }
  return messages;
}

ToldValues Rate(float rate) { return {.learning_rate = rate, .groups = nullptr}; }

TEST_CASE("A change holds from its version on, and what it does not name stays") {
  HyperparameterTimeline timeline({.learning_rate = 1, .momentum = 0.5F, .weight_decay = 0});
  timeline.Add({.version = 5, .values = {{"learning_rate", 0.1F}}});
  timeline.Add({.version = 7, .values = {{"momentum", 0.25F}}});
  CHECK(timeline.At(4).of_all.learning_rate == 1);
  CHECK(timeline.At(5).of_all.learning_rate == 0.1F);
  CHECK(timeline.At(6).of_all.momentum == 0.5F);
  CHECK(timeline.At(7).of_all.momentum == 0.25F);
  CHECK(timeline.At(100).of_all.learning_rate == 0.1F);
}

TEST_CASE("A change is told once, when the first version that is made with it is there") {
  HyperparameterTimeline timeline({});
  const Change change = {.version = 5, .values = {{"learning_rate", 0.25F}}};
  timeline.Add(change);
  CHECK(timeline.TakeMade(4).empty());
  CHECK(timeline.TakeMade(5) == std::vector<Change>{change});
  CHECK(timeline.TakeMade(6).empty());
  CHECK(timeline.At(7).of_all.learning_rate == 0.25F);
}

TEST_CASE("Of two changes at one version the later one counts") {
  HyperparameterTimeline timeline({});
  timeline.Add({.version = 5, .values = {{"learning_rate", 0.25F}, {"momentum", 0.5F}}});
  timeline.Add({.version = 5, .values = {{"learning_rate", 0.125F}}});
  CHECK(timeline.TakeMade(9) ==
        std::vector<Change>{{.version = 5, .values = {{"learning_rate", 0.125F}, {"momentum", 0.5F}}}});
}

TEST_CASE("A told learning rate holds from its version on, until a later one is told or set") {
  HyperparameterTimeline timeline({.learning_rate = 1});
  timeline.Add({.version = 3, .values = {{"learning_rate", 3}}});
  timeline.Add({.version = 5, .values = {{"momentum", 0.5F}}});
  timeline.Tell(2, Rate(20));
  timeline.Tell(3, Rate(30));
  timeline.Tell(5, Rate(50));
  const std::vector<float> rates = {1, 20, 3, 3, 50, 50};
  for (uint64_t version = 1; version <= rates.size(); ++version) {
    CHECK(timeline.At(version).of_all.learning_rate == rates[version - 1]);
  }
  CHECK(timeline.At(4, Rate(7)).of_all.learning_rate == 7);  // The same as if a push had told it.
  CHECK(timeline.At(3, Rate(7)).of_all.learning_rate == 3);
  for (uint64_t version = 1; version <= rates.size(); ++version) {
    CHECK(timeline.TakeMade(version).size() == (version == 3 || version == 5 ? 1 : 0));
    CHECK(timeline.At(version + 1).of_all.learning_rate == rates[std::min<size_t>(version, rates.size() - 1)]);
    CHECK(timeline.told().has_value() == (version == 2 || version >= 5));
  }
}

TEST_CASE("Every value that cannot be is named, with what can") {
  const auto problems = [](const std::vector<std::pair<std::string, float>>& values, const std::string& optimizer,
                           const std::string& outer = "") {
    const auto checked = CheckValues(Messages(values), {.optimizer = optimizer, .outer = outer});
    CHECK(checked.status().code() == absl::StatusCode::kInvalidArgument);
    return Message(checked.status());
  };
  CHECK(problems({}, "sgd") == "expected NAME=VALUE");
  CHECK(problems({{"learning_rate", -1}, {"nesterov", 1}, {"momentum", 0.5F}}, "sgd") ==
        "learning_rate=-1: expected a number above 0 (at least 1.2e-38)\n"
        "nesterov=1: there is no such hyperparameter; expected one of learning_rate, weight_decay\n"
        "momentum=0.5: not used by --optimizer=sgd; expected one of learning_rate, weight_decay");
  CHECK(problems({{"momentum", 0.5F}, {"momentum", 0.25F}}, "momentum") == "momentum=0.25: momentum is given twice");
  CHECK(problems({{"learning_rate", std::numeric_limits<float>::quiet_NaN()}}, "sgd") ==
        "learning_rate=nan: expected a number above 0 (at least 1.2e-38)");
  CHECK(problems({{"weight_decay", std::numeric_limits<float>::infinity()}}, "sgd") ==
        "weight_decay=inf: expected 0 or more");
  CHECK(problems({{"initial_accumulator_value", 1}, {"beta1", 0.5F}}, "adagrad") ==
        "initial_accumulator_value=1: cannot change while the job runs: it is what the sum of squared gradients begins "
        "with\n"
        "beta1=0.5: not used by --optimizer=adagrad; expected one of learning_rate, weight_decay, eps, lr_decay");
  CHECK(problems({{"beta2", 1}}, "adam") == "beta2=1: expected 0 or more, below 1");
  CHECK(problems({{"outer_lr", 1}}, "sgd") ==
        "outer_lr=1: not used: the mode has no --outer_optimizer; expected one of learning_rate, weight_decay");
  CHECK(
      problems({{"outer_momentum", 0.5F}}, "sgd", "adam") ==
      "outer_momentum=0.5: not used by --outer_optimizer=adam; expected one of learning_rate, weight_decay, outer_lr");
  CHECK(problems({{"outer_momentum", 1}}, kLocal, "nesterov") == "outer_momentum=1: expected 0 or more, below 1");
  CHECK(problems({{"learning_rate", 1}}, kLocal) == "learning_rate=1: not used by --optimizer=local");
  CHECK(problems({{"a\nb", 1}}, "sgd").find("a\\nb=1: there is no such hyperparameter") == 0);
}

TEST_CASE("Values are shown with the digits that they were given with") {
  const HyperparameterValues values =
      *CheckValues(Messages({{"momentum", 0.9F}, {"learning_rate", 1e-5F}}), {.optimizer = "momentum"});
  CHECK(ToString(values) == "learning_rate=1e-05 momentum=0.9");
  CHECK(ToJson(values).dump() == R"({"learning_rate":1e-05,"momentum":0.9})");
  HyperparameterMessages messages;
  ToProto(values, &messages);
  CHECK(FromProto(messages) == values);
  CHECK(ValuesOf(Changed({}, values), "momentum") ==
        HyperparameterValues{{"learning_rate", 1e-5F}, {"momentum", 0.9F}, {"weight_decay", 0}});
}

}  // namespace
}  // namespace ps
