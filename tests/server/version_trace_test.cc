#include "server/shard/version_trace.h"

#include <map>
#include <string>

#include <nlohmann/json.hpp>
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using std::chrono::milliseconds;

TEST_CASE("A version's trace has each push as it came and waited, the version, and an arrow through both") {
  const TempFolder folder;
  const std::string path = folder.File("t.json");
  const TimePoint now = Now();
  VersionTrace version = {
      .shard = 1, .version = 5, .committed = now + milliseconds(30), .published = now + milliseconds(40)};
  for (const uint32_t rank : {0U, 3U}) {
    version.contributions.push_back({.push = {.generation = 9, .rank = rank, .incarnation = 1, .step = 4},
                                     .samples = 10,
                                     .staleness = 2,
                                     .began = now + milliseconds(rank),
                                     .completed = now + milliseconds(10 + rank)});
  }
  {
    const auto trace = TraceWriter::Open(path, {});
    REQUIRE(trace.ok());
    (*trace)->Begin({.program = "ps_server", .who = "shard", .number = 1, .job = "default"});
    Write(version, **trace);
  }
  std::map<int, std::string> rows;
  std::map<std::string, double> ms;
  std::map<std::string, int> arrows;
  for (const auto& event : nlohmann::json::parse(ReadFile(path))) {
    if (event["name"] == "thread_name") rows[event["tid"]] = event["args"]["name"];
    if (event["ph"] == "X")
      ms[rows[event["tid"]] + ": " + event["name"].get<std::string>()] = event["dur"].get<double>() / 1e3;
    if (event["ph"] == "t") ++arrows[event["id"]];
  }
  CHECK(ms == std::map<std::string, double>{{"pushes of rank 0: arrives 4", 10},
                                            {"pushes of rank 0: waits 4", 30},
                                            {"pushes of rank 3: arrives 4", 10},
                                            {"pushes of rank 3: waits 4", 27},
                                            {"versions: apply 5", 10}});
  CHECK(arrows == std::map<std::string, int>{{ArrowId(version.contributions[0].push, 1), 2},
                                             {ArrowId(version.contributions[1].push, 1), 2}});
}

}  // namespace
}  // namespace ps
