#include "server/page/job_page.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/endpoint.h"
#include "common/status.h"
#include "server/server.h"
#include "tests/catch.h"
#include "tests/common/http/http_client.h"
#include "tests/server/quiet_log.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using nlohmann::ordered_json;

constexpr std::chrono::seconds kPatience(30);

std::unique_ptr<JobPage> StartPage(ServerOptions options = {}) {
  options.http_listen = "127.0.0.1:0";
  absl::StatusOr<std::unique_ptr<JobPage>> page = JobPage::Start(options);
  REQUIRE(page.ok());
  return *std::move(page);
}

Endpoint EndpointOf(const JobPage& page) {
  return *ParseEndpoint("page", std::string(absl::StripPrefix(page.address(), "http://")));
}

HttpReply Ask(const JobPage& page, const std::string& path) { return HttpClient(EndpointOf(page)).Get(path); }

ordered_json AskJson(const JobPage& page, const std::string& path) {
  const HttpReply reply = Ask(page, path);
  CHECK(reply.status == 200);
  return ordered_json::parse(reply.body);
}

// Asks until the answer has this status.
HttpReply Await(const JobPage& page, const std::string& path, int status) {
  const TimePoint deadline = Now() + kPatience;
  HttpReply reply = Ask(page, path);
  while (reply.status != status && Now() < deadline) {
    PauseUntil(Now() + std::chrono::milliseconds(10));
    reply = Ask(page, path);
  }
  CHECK(reply.status == status);
  return reply;
}

PageSnapshot ChiefSnapshot(uint64_t version) {
  PageSnapshot snapshot{.unix_ms = 1'700'000'000'000 + 1000 * version};
  snapshot.shard.set_version(version);
  v1::StatusReply& job = snapshot.job.emplace();
  job.set_job("a<b>");
  job.set_phase(v1::PHASE_RUNNING);
  job.mutable_progress()->set_step(version);
  job.mutable_progress()->set_running_s(static_cast<double>(version));
  job.mutable_progress()->mutable_loss()->set_batches(1);
  job.mutable_progress()->mutable_loss()->set_mean(0.5);
  job.mutable_progress()->mutable_loss()->set_least(0.5);
  job.mutable_progress()->mutable_loss()->set_largest(0.5);
  return snapshot;
}

TEST_CASE("Before the server has said anything, the page is there and says so") {
  const auto page = StartPage();
  CHECK(Ask(*page, "/").status == 200);
  CHECK(Ask(*page, "/healthz").status == 503);
  CHECK(ordered_json::parse(Ask(*page, "/api/v1/job").body)["error"] == "the server is starting");
  CHECK(Ask(*page, "/metrics").body.find("process_cpu_seconds_total") != std::string::npos);
}

TEST_CASE("What the server says is shown: the job, its curves and events, metrics, health") {
  const auto page = StartPage();
  for (uint64_t version = 1; version <= 3; ++version) {
    page->Observe(ChiefSnapshot(version));
    const TimePoint deadline = Now() + kPatience;  // One that comes too soon would take the place of the one before.
    const std::string line = absl::StrCat("\nps_version ", version, "\n");
    while (Ask(*page, "/metrics").body.find(line) == std::string::npos && Now() < deadline) continue;
  }
  CHECK(Ask(*page, "/healthz").body == "ok\n");
  const ordered_json job = AskJson(*page, "/api/v1/job");
  CHECK(job["job"] == "a<b>");
  CHECK(job["progress"]["step"] == 3);
  CHECK(job["runs"].empty());
  const ordered_json series = AskJson(*page, "/api/v1/series");
  CHECK(!series["series"]["loss"]["points"].empty());
  CHECK(AskJson(*page, absl::StrCat("/api/v1/series?since=", series["cursor"].get<std::string>()))["series"]["loss"]
            .is_null());
  CHECK(!AskJson(*page, "/api/v1/events")["events"].empty());
  CHECK(Ask(*page, "/api/v1/series?run=none").status == 404);
}

TEST_CASE("A job that failed is not healthy, and says why") {
  const auto page = StartPage();
  PageSnapshot snapshot = ChiefSnapshot(1);
  snapshot.health = absl::UnavailableError("the job failed: rank 3 was lost");
  page->Observe(snapshot);
  CHECK(Await(*page, "/metrics", 200).status == 200);
  const TimePoint deadline = Now() + kPatience;
  while (Ask(*page, "/healthz").body != "the job failed: rank 3 was lost\n" && Now() < deadline) continue;
  CHECK(Ask(*page, "/healthz").status == 503);
}

TEST_CASE("A page goes at once, unless its job has ended and a browser is yet to see that") {
  const auto page = StartPage();
  std::stop_source stop;
  const auto seconds_to_go = [&] {
    const TimePoint began = Now();
    page->AwaitLastLook(stop.get_token());
    return std::chrono::duration<double>(Now() - began).count();
  };
  page->Observe(ChiefSnapshot(1));
  CHECK(Await(*page, "/api/v1/job", 200).status == 200);
  CHECK(seconds_to_go() < 1);

  PageSnapshot ended = ChiefSnapshot(2);
  ended.job->set_phase(v1::PHASE_FINISHED);
  page->Observe(ended);
  CHECK(Ask(*page, "/metrics").status == 200);
  CHECK(seconds_to_go() > 1);
  stop.request_stop();  // Whoever stops it does not wait for browsers.
  CHECK(seconds_to_go() < 1);

  const auto unseen = StartPage();
  unseen->Observe(ended);
  CHECK(Await(*unseen, "/healthz", 200).status == 200);
  const TimePoint began = Now();
  unseen->AwaitLastLook({});
  CHECK(Now() - began < std::chrono::seconds(1));
}

TEST_CASE("Snapshots may come as fast as they like, from any thread: the newest is shown") {
  const auto page = StartPage();
  std::thread other([&] {
    for (int i = 0; i < 2000; ++i) page->Observe(ChiefSnapshot(1));
  });
  for (int i = 0; i < 200; ++i) CHECK(Ask(*page, "/metrics").status == 200);
  other.join();
  page->Observe(ChiefSnapshot(9));
  const TimePoint deadline = Now() + kPatience;
  while (Ask(*page, "/metrics").body.find("\nps_version 9\n") == std::string::npos && Now() < deadline) continue;
  CHECK(Ask(*page, "/metrics").body.find("\nps_version 9\n") != std::string::npos);
}

TEST_CASE("A page beyond this machine needs --insecure, and one without a port is refused") {
  ServerOptions options;
  for (const char* wrong : {"0.0.0.0:8080", "node7:8080", "nowhere", "unix:/tmp/page", "127.0.0.1:99999"}) {
    CAPTURE(wrong);
    options.http_listen = wrong;
    CHECK(Message(ValidateServerOptions(options)).find(absl::StrCat("--http_listen=", wrong)) == 0);
  }
  options.http_listen = "0.0.0.0:8080";
  options.insecure = true;
  CHECK(ValidateServerOptions(options).ok());
  options = {.http_runs = "runs"};
  CHECK(Message(ValidateServerOptions(options)).find("--http_runs=runs") == 0);
}

TEST_CASE("A page shows one server after the other: the job's generations, and whose calls were refused") {
  const QuietLog quiet;
  ServerOptions options;
  options.num_workers = 2;
  options.shared_memory = "off";
  const auto page = StartPage(options);
  uint64_t generation = 0;
  for (int round = 0; round < 2; ++round) {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options, {}, {}, nullptr, nullptr, page.get());
    REQUIRE(server.ok());
    Await(*page, "/healthz", 200);
    ordered_json job = AskJson(*page, "/api/v1/job");
    const TimePoint deadline = Now() + kPatience;
    while (job["generation"].get<uint64_t>() == generation && Now() < deadline) job = AskJson(*page, "/api/v1/job");
    CHECK(job["phase"] == "gathering");
    CHECK(job["num_workers"] == 2);
    CHECK(job["generation"].get<uint64_t>() != generation);
    generation = job["generation"].get<uint64_t>();
  }
  CHECK(Ask(*page, "/").status == 200);  // Without a server it still says what it knows.
  CHECK(AskJson(*page, "/api/v1/job")["generation"].get<uint64_t>() == generation);
}

TEST_CASE("A server that is not the chief shows its own part, and says who shows the job") {
  const auto page = StartPage({.shard = 1, .num_shards = 2, .chief = "node0:5000"});
  PageSnapshot snapshot{.unix_ms = 1'700'000'000'000, .address = "node1:5000"};
  snapshot.shard.set_shard(1);
  snapshot.shard.set_version(7);
  page->Observe(snapshot);
  const ordered_json job = ordered_json::parse(Await(*page, "/api/v1/job", 200).body);
  CHECK(job["chief"] == "node0:5000");
  CHECK(job["headline"].get<std::string>().find("node0:5000") != std::string::npos);
  REQUIRE(job["shards"].size() == 1);
  CHECK(job["shards"][0]["version"] == 7);
  CHECK(job["shards"][0]["address"] == "node1:5000");
}

}  // namespace
}  // namespace ps
