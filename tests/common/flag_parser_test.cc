#include "common/flag_parser.h"

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "tests/catch.h"

ABSL_FLAG(absl::Duration, test_pause, absl::Seconds(1), "how long");
ABSL_FLAG(int, test_count, 0, "how many");
ABSL_FLAG(bool, test_loud, true, "how loud");

namespace ps {
namespace {

absl::StatusOr<CommandLine> Parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  argv.reserve(arguments.size());
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

TEST_CASE("The command line says which flags were given, in whatever form") {
  const auto line = Parse({"--test_count=3", "--notest_loud", "-test_pause", "5s", "rest"});
  REQUIRE(line.ok());
  CHECK(line->given == std::set<std::string>{"test_count", "test_loud", "test_pause"});
  CHECK(line->arguments == std::vector<std::string>{"rest"});
  CHECK(absl::FindCommandLineFlag("test_pause")->CurrentValue() == "5s");
  CHECK(Parse({})->given.empty());
}

TEST_CASE("A duration without a unit is refused by saying so") {
  CHECK(Message(Parse({"--test_pause=5"}).status()) == "--test_pause=5: a unit is missing, for example 5s");
  CHECK(Message(Parse({"--test_pause=0.5"}).status()) == "--test_pause=0.5: a unit is missing, for example 0.5s");
  CHECK(Message(Parse({"--test_pause=soon"}).status()) ==
        "--test_pause=soon: not a valid value (how long; units are ms, s, m and h)");
  CHECK(Message(Parse({"--test_pause=2min"}).status()) ==
        "--test_pause=2min: not a valid value (how long; units are ms, s, m and h)");
}

TEST_CASE("A flag that was given and has no effect is refused with the reason, and one that was not given is not") {
  const auto line = Parse({"--test_count=3"});
  REQUIRE(line.ok());
  CHECK(Message(CheckIdleFlags(*line, {{"test_count", true, "nothing is counted"}, {"test_loud", true, "at night"}})) ==
        "--test_count=3: has no effect: nothing is counted");
  CHECK(CheckIdleFlags(*line, {{"test_count", false, ""}, {"test_loud", true, ""}}).ok());
}

}  // namespace
}  // namespace ps
