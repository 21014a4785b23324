#include <algorithm>
#include "ps/client.h"

#include "tests/catch.h"

namespace ps {
namespace {

std::string Problem(const ClientOptions& options) {
  const absl::Status status = ValidateClientOptions(options);
  CHECK((status.ok() || absl::IsInvalidArgument(status)));
  return std::string(status.message().data(), status.message().size());
}

ClientOptions At(const std::string& server) {
  ClientOptions options;
  options.server = server;
  return options;
}

TEST_CASE("A client's defaults need only a server's address") {
  CHECK(Problem(At("10.0.0.1:5000")).empty());
  CHECK(Problem(At("unix:/run/ps")).empty());
  CHECK(Problem(At("")).find("--server") == 0);
}

TEST_CASE("Each of a client's options is refused by its name") {
  const auto with = [](auto set) {
    ClientOptions options = At("10.0.0.1:5000");
    set(options);
    return Problem(options);
  };
  CHECK(with([](auto& options) { options.job.clear(); }).find("--job") == 0);
  CHECK(with([](auto& options) { options.job = std::string("two\nlines"); }).find("--job") == 0);
  CHECK(with([](auto& options) { options.name.assign(300, 'n'); }).find("--name") == 0);
  CHECK(with([](auto& options) { options.name.assign(1, '\xff'); }).find("--name") == 0);
  CHECK(with([](auto& options) { options.rank = 4096; }) == "--rank=4096: expected 0 to 4095");
  CHECK(with([](auto& options) { options.experiment["seed"].assign(1, '\xff'); }).find("--seed") == 0);
  CHECK(with([](auto& options) { options.connect_timeout = absl::ZeroDuration(); }) ==
        "--connect_timeout=0: expected more than 0, at most 240h");
  CHECK(with([](auto& options) { options.start_timeout = -absl::Seconds(1); }).find("--start_timeout=-1s") == 0);
  CHECK(with([](auto& options) { options.start_timeout = absl::InfiniteDuration(); }).find("--start_timeout") == 0);
  CHECK(with([](auto& options) { options.notice_every = absl::Microseconds(1); }).find("notice_every") == 0);
}

TEST_CASE("All problems of a client's options are told at once, and Join tells them before anything else") {
  ClientOptions options = At("nowhere");
  options.job.clear();
  options.connect_timeout = absl::ZeroDuration();
  const std::string problems = Problem(options);
  CHECK(std::count(problems.begin(), problems.end(), '\n') == 2);
  CHECK(Client::Join(options, {{"w", {1}}}).status() == ValidateClientOptions(options));
}

}  // namespace
}  // namespace ps
