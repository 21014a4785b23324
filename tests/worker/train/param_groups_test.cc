#include "worker/train/param_groups.h"

#include <limits>

#include "common/status.h"
#include "tests/catch.h"
#include "worker/model/options.h"

namespace ps {
namespace {

// layer0.weight, layer0.bias, layer1.weight, layer1.bias
Layout FourTensors() { return ModelLayout({.widths = {4, 3, 2}}); }

// "1/0" is a learning rate factor of 1 and a weight decay factor of 0; of each tensor of FourTensors.
std::vector<std::string> FactorsOf(const std::string& groups, bool decay_biases = true) {
  const absl::StatusOr<std::vector<ParamGroup>> parsed = ParseParamGroups(groups);
  REQUIRE(parsed.ok());
  const absl::StatusOr<Layout> layout = WithFactors(FourTensors(), *parsed, decay_biases);
  REQUIRE(layout.ok());
  std::vector<std::string> factors;
  factors.reserve(layout->size());
  for (const TensorSpec& tensor : *layout) {
    factors.push_back(std::to_string(static_cast<int>(tensor.learning_rate_factor * 100)) + "/" +
                      std::to_string(static_cast<int>(tensor.weight_decay_factor * 100)));
  }
  return factors;
}

std::string GroupProblem(const std::string& groups) {
  const absl::StatusOr<std::vector<ParamGroup>> parsed = ParseParamGroups(groups);
  return Message(parsed.ok() ? WithFactors(FourTensors(), *parsed, true).status() : parsed.status());
}

using Factors = std::vector<std::string>;

TEST_CASE("Without groups every factor is 1, but biases need not decay") {
  CHECK(FactorsOf("") == Factors{"100/100", "100/100", "100/100", "100/100"});
  CHECK(FactorsOf("", false) == Factors{"100/100", "100/0", "100/100", "100/0"});
}

TEST_CASE("The last group that matches a tensor counts, for what it names") {
  CHECK(FactorsOf("layer0.*:learning_rate=0.5") == Factors{"50/100", "50/100", "100/100", "100/100"});
  CHECK(FactorsOf("*:weight_decay=0;*weight:learning_rate=2") == Factors{"200/100", "100/0", "200/100", "100/0"});
  CHECK(FactorsOf("layer?.bias:learning_rate=0,weight_decay=0.25") == Factors{"100/100", "0/25", "100/100", "0/25"});
  CHECK(FactorsOf("*bias:learning_rate=0.5", false) == Factors{"100/100", "50/0", "100/100", "50/0"});
  CHECK(FactorsOf("layer1.bias:weight_decay=1", false) == Factors{"100/100", "100/0", "100/100", "100/100"});
}

TEST_CASE("A pattern's star stands for any text, also none, and its question mark for one character") {
  CHECK(FactorsOf("l*y*1*s:weight_decay=0") == Factors{"100/100", "100/100", "100/100", "100/0"});
  CHECK(FactorsOf("*layer0.bias*:weight_decay=0") == Factors{"100/100", "100/0", "100/100", "100/100"});
  CHECK(FactorsOf("??????.????:weight_decay=0") == Factors{"100/100", "100/0", "100/100", "100/0"});
  for (const char* pattern : {"layer", "layer0.bia", "?", "*layer2*", "layer0.bias?", "LAYER0.*"}) {
    INFO(pattern);
    CHECK(GroupProblem(std::string(pattern) + ":weight_decay=0") ==
          "--param_groups: " + std::string(pattern) +
              ": no tensor of the model has such a name; it has layer0.weight, layer0.bias, layer1.weight, "
              "layer1.bias");
  }
}

TEST_CASE("A pattern with many stars takes no time to speak of") {
  std::string pattern;
  for (int i = 0; i < 50; ++i) pattern += "a*";
  const Layout layout = {{std::string(256, 'a'), {1}}};
  CHECK_FALSE(WithFactors(layout, {{.pattern = pattern + "b"}}, true).ok());
}

TEST_CASE("A group that is written wrongly, or has a bad factor, is refused with its text") {
  const std::pair<const char*, const char*> bad[] = {
      {"layer0.*", "--param_groups: layer0.*: there is no pattern; expected PATTERN:learning_rate=FACTOR"},
      {":weight_decay=0", "there is no pattern"},
      {"*:", "\"\" is no factor"},
      {"*:rate=1", "\"rate=1\" is no factor"},
      {"*:weight_decay", "\"weight_decay\" is no factor"},
      {"*:weight_decay=much", "weight_decay=much: the factor is not a number"},
      {"*:weight_decay=", "weight_decay=: the factor is not a number"},
      {"*:weight_decay=1,weight_decay=1", "weight_decay is given twice"},
      {"*:weight_decay=1;", "--param_groups: : there is no pattern"},
      {"*:weight_decay=-1", "--param_groups: *:weight_decay=-1: expected a factor of 0 or more"},
      {"*:learning_rate=nan", "--param_groups: *:learning_rate=nan: expected a factor of 0 or more"},
      {"*:learning_rate=inf", "--param_groups: *:learning_rate=inf: expected a factor of 0 or more"},
  };
  for (const auto& [groups, message] : bad) {
    INFO(groups);
    CHECK(GroupProblem(groups).find(message) != std::string::npos);
  }
}

}  // namespace
}  // namespace ps
