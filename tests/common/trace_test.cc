#include "common/trace.h"

#include <cmath>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

TimePoint At(int ms) { return TimePoint(milliseconds(ms)); }

std::vector<Json> Named(const Json& events, const std::string& phase) {
  std::vector<Json> named;
  for (const Json& event : events) {
    if (event["ph"] == phase) named.push_back(event);
  }
  return named;
}

TEST_CASE("Steps to be traced are given by the first and the last, either of which may be left out") {
  CHECK(ParseTracedSteps("")->Has(UINT64_MAX));
  const TracedSteps some = *ParseTracedSteps("10:50");
  CHECK_FALSE(some.Has(9));
  CHECK(some.Has(10));
  CHECK(some.Has(50));
  CHECK_FALSE(some.Has(51));
  CHECK(ParseTracedSteps(":3")->Has(0));
  CHECK(ParseTracedSteps("3:")->Has(3));
  CHECK_FALSE(ParseTracedSteps("3:")->Has(2));
  for (const std::string bad : {"10", "5:4", "a:b", "1:2:3", "-1:2"}) {
    CHECK(Message(ParseTracedSteps(bad).status()).find("--trace_steps=" + bad + ": expected FIRST:LAST") == 0);
  }
}

TEST_CASE("Spans that overlap are put in rows of their own, the first row that is free first") {
  TraceRows rows;
  CHECK(rows.Place("versions", false, At(0), At(10)).of_name == 0);
  CHECK(rows.Place("versions", false, At(5), At(12)).of_name == 1);
  CHECK(rows.Place("versions", false, At(11), At(13)).of_name == 0);
  CHECK(rows.Place("versions", false, At(10), At(14)).of_name == 2);
  CHECK(rows.Place("pushes", false, At(0), At(14)).number == 4);
}

TEST_CASE("Spans without length follow each other in a row, and none overlaps with another") {
  TraceRows rows;
  TimePoint until = At(0);
  for (int i = 0; i < 3; ++i) {
    const TraceRows::Row row = rows.Place("exchanges", false, At(0), At(0));
    CHECK(row.of_name == 0);
    CHECK(row.begin >= until);
    CHECK(row.end > row.begin);
    until = row.end;
  }
  CHECK(rows.Place("exchanges", false, At(0), At(1)).begin == until);
}

TEST_CASE("Spans that are nested share a row") {
  TraceRows rows;
  CHECK(rows.Place("computes", true, At(2), At(3)).of_name == 0);
  CHECK(rows.Place("computes", true, At(0), At(10)).of_name == 0);
}

TEST_CASE("A trace is valid JSON once its writer has ended, with times since the process's start") {
  const TempFolder folder;
  const std::string path = folder.File("t.json");
  {
    const auto trace = TraceWriter::Open(path, {.first = 1, .last = 2});
    REQUIRE(trace.ok());
    CHECK((*trace)->Wants(1));
    CHECK_FALSE((*trace)->Wants(3));
    (*trace)->Add({.row = "early", .name = "dropped", .begin = Now(), .end = Now()});
    (*trace)->Begin({.program = "ps_worker", .who = "rank", .number = 3, .job = "a \"job\" <b>"});
    const TimePoint now = Now();
    const double since_start = SecondsSinceStart();
    const TracedPush push = {.generation = 9, .rank = 3, .incarnation = 1, .step = 1};
    (*trace)->Add({.row = "exchanges",
                   .name = "push 1",
                   .begin = now,
                   .end = now + milliseconds(2),
                   .args = TraceArgs().Add("step", uint64_t{1}).Add("loss", std::nan("")),
                   .arrows = {{.part = ArrowPart::kLeaves, .push = push, .shard = 0}}});
    (*trace)->Add({.row = "exchanges",
                   .name = "pull",
                   .begin = now + milliseconds(3),
                   .end = now + milliseconds(5),
                   .arrows = {{.part = ArrowPart::kEnds, .push = push, .shard = 0}}});
    (*trace)->AddMark("rolled back", now);
    REQUIRE((*trace)->Flush(Now() + std::chrono::seconds(30)));
    const std::string open = ReadFile(path);  // As whoever killed the process finds it: but for its end.
    CHECK(Json::parse(open.substr(0, open.size() - 2) + "]").size() == 9);
    const Json first = Json::parse(open.substr(0, open.size() - 2) + "]")[0];
    CHECK(first["name"] == kTraceProcessEvent);
    CHECK(first["args"]["rank"] == 3);
    CHECK(first["args"]["job"] == "a \"job\" <b>");
    const std::vector<Json> spans = Named(Json::parse(open.substr(0, open.size() - 2) + "]"), "X");
    REQUIRE(spans.size() == 2);
    CHECK(spans[0]["ts"].get<double>() == Approx(since_start * 1e6).margin(2000));
    CHECK(spans[0]["dur"] == 2000.0);
    CHECK(spans[0]["args"].dump() == R"({"step":1,"loss":"nan"})");
    CHECK(spans[1]["ts"].get<double>() - spans[0]["ts"].get<double>() == Approx(3000));
    CHECK(spans[0]["tid"] == spans[1]["tid"]);
  }
  const Json events = Json::parse(ReadFile(path));
  const std::vector<Json> leaves = Named(events, "s");
  const std::vector<Json> ends = Named(events, "f");
  REQUIRE((leaves.size() == 1 && ends.size() == 1));
  CHECK(leaves[0]["id"] == ends[0]["id"]);
  CHECK(leaves[0]["ts"].get<double>() < ends[0]["ts"].get<double>());
  CHECK(Named(events, "i").size() == 1);
}

TEST_CASE("Arrows of other pushes, and to other shards, have other numbers") {
  const TracedPush push = {.generation = 1, .rank = 2, .incarnation = 3, .step = 4};
  TracedPush other = push;
  other.incarnation = 4;
  CHECK(ArrowId(push, 0) == ArrowId(push, 0));
  CHECK(ArrowId(push, 0) != ArrowId(push, 1));
  CHECK(ArrowId(push, 0) != ArrowId(other, 0));
}

TEST_CASE("A trace without a path takes nothing and writes nothing") {
  const auto trace = TraceWriter::Open("", {});
  REQUIRE(trace.ok());
  CHECK_FALSE((*trace)->Wants(0));
  (*trace)->Begin({});
  (*trace)->Add({.row = "r", .name = "n", .begin = At(0), .end = At(1)});
}

}  // namespace
}  // namespace ps
