#include "common/http/job_site.h"

#include <string>

#include "common/status.h"
#include "tests/catch.h"

namespace ps {
namespace {

using nlohmann::ordered_json;

JobSource Source() {
  return {.job =
              [] {
                return ordered_json{{"job", "a\"<b>\xff"}};
              },
          .series = [](const std::string& cursor, const std::string& run) -> absl::StatusOr<ordered_json> {
            if (run == "none") return NotFound("there is no run none");
            return ordered_json{{"cursor", cursor}, {"run", run}};
          },
          .events =
              [](uint64_t since) {
                return ordered_json{{"next", since}};
              },
          .metrics = [] { return std::string("ps_version 1\n"); },
          .healthy = [] { return absl::OkStatus(); }};
}

HttpResponse Ask(const JobSource& source, const std::string& path, std::map<std::string, std::string> query = {}) {
  return AnswerFromJob({.path = path, .query = std::move(query)}, source);
}

TEST_CASE("The job, its series and its events come as JSON, whatever bytes names have") {
  const HttpResponse job = Ask(Source(), "/api/v1/job");
  CHECK(job.status == 200);
  CHECK(job.type == "application/json");
  CHECK(job.etag.empty());
  CHECK(ordered_json::parse(*job.body)["job"] == "a\"<b>\xEF\xBF\xBD");
  const HttpResponse series = Ask(Source(), "/api/v1/series", {{"since", "7.1"}, {"run", "before"}});
  CHECK(*series.body == R"({"cursor":"7.1","run":"before"})");
  CHECK(*Ask(Source(), "/api/v1/events", {{"since", "12"}}).body == R"({"next":12})");
  CHECK(*Ask(Source(), "/api/v1/events").body == R"({"next":0})");
}

TEST_CASE("What cannot be answered says why, in JSON where JSON was asked for") {
  CHECK(Ask(Source(), "/api/v1/series", {{"run", "none"}}).status == 404);
  for (const char* since : {"-1", "1.5", "x", "99999999999999999999"}) {
    CAPTURE(since);
    const HttpResponse events = Ask(Source(), "/api/v1/events", {{"since", since}});
    CHECK(events.status == 400);
    CHECK(ordered_json::parse(*events.body)["error"].get<std::string>().find("since=") == 0);
  }
  const HttpResponse unknown = Ask(Source(), "/api/v2/job");
  CHECK(unknown.status == 404);
  CHECK(ordered_json::parse(*unknown.body).contains("error"));
  JobSource starting = Source();
  starting.job = [] { return absl::UnavailableError("the server is starting"); };
  CHECK(Ask(starting, "/api/v1/job").status == 503);
}

TEST_CASE("Health is a word, or why not") {
  JobSource source = Source();
  CHECK(*Ask(source, "/healthz").body == "ok\n");
  source.healthy = [] { return absl::UnavailableError("the job failed: x"); };
  const HttpResponse failed = Ask(source, "/healthz");
  CHECK(failed.status == 503);
  CHECK(*failed.body == "the job failed: x\n");
}

TEST_CASE("Metrics are there only where there are any") {
  JobSource source = Source();
  CHECK(Ask(source, "/metrics").type.find("version=0.0.4") != std::string::npos);
  source.metrics = nullptr;
  CHECK(Ask(source, "/metrics").status == 404);
}

TEST_CASE("The page's files and Chart.js are there, each with its type, compressed or not") {
  for (const auto& [path, type] : std::vector<std::pair<std::string, std::string>>{
           {"/", "text/html"}, {"/index.html", "text/html"}, {"/chart.js", "text/javascript"}}) {
    CAPTURE(path);
    const HttpResponse plain = AnswerFromJob({.path = path}, Source());
    const HttpResponse packed = AnswerFromJob({.path = path, .takes_gzip = true}, Source());
    CHECK(plain.status == 200);
    CHECK(plain.type.find(type) == 0);
    CHECK(!plain.gzipped);
    CHECK(packed.gzipped);
    CHECK(packed.body->size() < plain.body->size());
    CHECK(!plain.etag.empty());
    CHECK(plain.etag != packed.etag);
  }
  CHECK(Ask(Source(), "/chart.js").body->find("Chart.js v") != std::string::npos);
  for (const char* path : {"", "/..", "/page/index.html", "/../etc/passwd", "/CHART.JS"}) {
    CAPTURE(path);
    CHECK(Ask(Source(), path).status == 404);
  }
}

}  // namespace
}  // namespace ps
