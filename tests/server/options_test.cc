#include "server/options.h"

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "server/flags.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Defaults are valid") { CHECK(ValidateServerOptions({}).ok()); }

TEST_CASE("Every bad flag is named at once") {
  ServerOptions options;
  options.listen = "nowhere";
  options.num_workers = 0;
  options.mode.name = "fast";
  options.optimizer = "magic";
  options.hyperparameters.learning_rate = -1;
  options.hyperparameters.momentum = 1;
  options.shard = 3;
  const std::string text = Message(ValidateServerOptions(options));
  for (const char* flag :
       {"--listen", "--num_workers", "--mode", "--optimizer", "--learning_rate", "--momentum", "--shard", "--chief"}) {
    CHECK(text.find(flag) != std::string::npos);
  }
}

TEST_CASE("No shards is one problem, told with the accepted range") {
  ServerOptions options;
  options.num_shards = 0;
  CHECK(Message(ValidateServerOptions(options)) == "--num_shards=0: expected 1 to 1024");
}

TEST_CASE("Listening beyond this machine needs --insecure") {
  ServerOptions options;
  options.listen = "0.0.0.0:0";
  CHECK(Message(ValidateServerOptions(options)).find("--insecure") != std::string::npos);
  options.insecure = true;
  CHECK(ValidateServerOptions(options).ok());
}

TEST_CASE("A bad hyperparameter gives one line with its flag, whichever optimizer is chosen") {
  for (const std::string& optimizer : OptimizerNames()) {
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(each.flag);
      ServerOptions options;
      options.optimizer = optimizer;
      options.hyperparameters.*each.field = -1;
      const std::string text = Message(ValidateServerOptions(options));
      CHECK(text.find(absl::StrCat("--", each.flag, "=-1: expected ")) == 0);
      CHECK(text.find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("Servers compare exactly the hyperparameters that their optimizer uses") {
  for (const std::string& optimizer : OptimizerNames()) {
    ServerOptions options;
    options.optimizer = optimizer;
    const auto settings = SharedSettings(options);
    size_t used = 0;
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(optimizer << " " << each.flag);
      used += each.UsedBy(optimizer) ? 1 : 0;
      ServerOptions other = options;
      other.hyperparameters.*each.field += 1e-7F;  // A change that six digits do not show.
      CHECK((SharedSettings(other) != settings) == each.UsedBy(optimizer));
      CHECK(settings.count(each.flag) == (each.UsedBy(optimizer) ? 1 : 0));
    }
    CHECK(settings.size() == used + 4);  // And mode, optimizer, num_workers, num_shards.
  }
  ServerOptions momentum;
  momentum.optimizer = "momentum";
  CHECK(SharedSettings(momentum).at("momentum") == "0.9");
  CHECK(SharedSettings({}).count("momentum") == 0);
}

TEST_CASE("Each hyperparameter has a flag with the table's default and help, which sets it") {
  for (const HyperparameterInfo& each : HyperparameterTable()) {
    INFO(each.flag);
    const absl::FlagSaver kept;
    absl::CommandLineFlag* const flag = absl::FindCommandLineFlag(each.flag);
    REQUIRE(flag != nullptr);
    CHECK(ServerOptionsFromFlags().hyperparameters.*each.field == Hyperparameters{}.*each.field);
    CHECK(flag->Help() == each.Help());
    std::string error;
    REQUIRE(flag->ParseFrom("0.625", &error));
    CHECK(ServerOptionsFromFlags().hyperparameters.*each.field == 0.625F);
  }
  CHECK(absl::FindCommandLineFlag("optimizer")->Help() == OptimizerChoices());
}

TEST_CASE("A hyperparameter's flag is refused where the optimizer does not use it, and only there") {
  const absl::FlagSaver kept;
  for (const std::string& optimizer : OptimizerNames()) {
    std::string error;
    REQUIRE(absl::FindCommandLineFlag("optimizer")->ParseFrom(optimizer, &error));
    CommandLine all;
    std::vector<std::string> refused;
    for (const HyperparameterInfo& each : HyperparameterTable()) {
      INFO(optimizer << " " << each.flag);
      CHECK(CheckServerFlags({.given = {each.flag}}).ok() == each.UsedBy(optimizer));
      all.given.insert(each.flag);
      if (each.UsedBy(optimizer)) continue;
      refused.push_back(absl::StrCat("--", each.flag, "=", Hyperparameters{}.*each.field,
                                     ": has no effect: --optimizer=", optimizer, " has no ", each.flag));
    }
    std::vector<std::string> lines = absl::StrSplit(Message(CheckServerFlags(all)), '\n', absl::SkipEmpty());
    CHECK(lines == refused);  // All at once, one a line.
  }
}

}  // namespace
}  // namespace ps
