#include "server/options.h"

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

TEST_CASE("Defaults are valid") { CHECK(ValidateServerOptions({}).ok()); }

TEST_CASE("Every bad flag is named at once") {
  ServerOptions options;
  options.listen = "nowhere";
  options.num_workers = 0;
  options.mode = "fast";
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

}  // namespace
}  // namespace ps
