#include "worker/ctl/traces.h"

#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "common/clock.h"
#include "common/status.h"
#include "common/trace.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

using Json = nlohmann::ordered_json;

// ---- Clocks

// A server whose clock shows `ahead_us` more than that of workers, and pushes that are `there_us` and `back_us` on
// their way, and 100 us at the server.
struct Link {
  double ahead_us = 0;
  std::vector<std::pair<double, double>> there_and_back_us;
};

TraceClock Worker(const Link& link, const std::string& clock) {
  TraceClock worker = {.clock = clock};
  for (size_t i = 0; i < link.there_and_back_us.size(); ++i) {
    const double left = 1e6 * static_cast<double>(i);
    const auto [there, back] = link.there_and_back_us[i];
    worker.arrows[clock + std::to_string(i)] = {.leaves = left, .passes = {}, .ends = left + there + 100 + back};
  }
  return worker;
}

void AddPushes(const Link& link, const std::string& worker, TraceClock& server) {
  for (size_t i = 0; i < link.there_and_back_us.size(); ++i) {
    const double arrived = 1e6 * static_cast<double>(i) + link.there_and_back_us[i].first + link.ahead_us;
    server.arrows[worker + std::to_string(i)] = {.leaves = {}, .passes = {arrived, arrived + 100}, .ends = {}};
  }
}

TEST_CASE("Processes that share a clock are aligned by it exactly, whatever their pushes and wall clocks say") {
  const std::vector<AlignedClock> aligned = AlignClocks(
      {{.clock = "boot", .steady_us = 1000, .unix_us = 5}, {.clock = "boot", .steady_us = 4000, .unix_us = 99}});
  CHECK(aligned[1].by == AlignedClock::By::kSteadyClock);
  CHECK(aligned[1].offset_us == 3000);
  CHECK(aligned[1].error_us == 0.0);
}

TEST_CASE("Another machine's clock is aligned by its fastest pushes, and the error is what these leave open") {
  const Link link = {.ahead_us = 7e9, .there_and_back_us = {{500, 90}, {40, 700}, {60, 50}, {300, 300}}};
  TraceClock server = {.clock = "s"};
  AddPushes(link, "w", server);
  const std::vector<AlignedClock> aligned = AlignClocks({server, Worker(link, "w")});
  CHECK(aligned[1].by == AlignedClock::By::kArrows);
  CHECK(*aligned[1].error_us == Approx((40 + 50) / 2.0));
  CHECK(std::abs(aligned[1].offset_us - link.ahead_us) <= *aligned[1].error_us + 1e-3);
  CHECK(aligned[1].misfit_us == 0);
}

TEST_CASE("A clock that no push reaches directly is aligned through others, and errors add up") {
  const Link near = {.ahead_us = 1e6, .there_and_back_us = {{10, 10}}};
  const Link far = {.ahead_us = -5e6, .there_and_back_us = {{200, 100}}};
  TraceClock first = {.clock = "s0"};
  TraceClock second = {.clock = "s1"};
  AddPushes(near, "w", first);
  TraceClock worker = Worker(near, "w");
  for (auto& [id, arrow] : Worker(far, "w").arrows) worker.arrows["to s1 " + id] = arrow;
  TraceClock of_far = {.clock = "unused"};
  AddPushes(far, "w", of_far);
  for (auto& [id, arrow] : of_far.arrows) second.arrows["to s1 " + id] = arrow;
  const std::vector<AlignedClock> aligned = AlignClocks({first, second, worker});
  CHECK(*aligned[2].error_us == Approx(10));
  CHECK(*aligned[1].error_us == Approx(10 + 150));
  CHECK(std::abs(aligned[1].offset_us - 6e6) <= 160 + 1e-3);
}

TEST_CASE("Clocks that ran at different speeds are aligned as well as can be, and it is said by how much not") {
  const Link link = {.ahead_us = 0, .there_and_back_us = {{10, 10}, {10, 10}}};
  TraceClock server = {.clock = "s"};
  AddPushes(link, "w", server);
  for (double& at : server.arrows["w1"].passes) at += 500;  // It has gained on the worker's.
  const std::vector<AlignedClock> aligned = AlignClocks({server, Worker(link, "w")});
  CHECK(aligned[1].misfit_us == Approx(500 - 20));
  CHECK(*aligned[1].error_us >= 240);
}

TEST_CASE("A process without pushes is aligned by the wall clock, with an error that nobody knows") {
  const std::vector<AlignedClock> aligned = AlignClocks(
      {{.clock = "a", .steady_us = 100, .unix_us = 1000}, {.clock = "b", .steady_us = 77, .unix_us = 3000}});
  CHECK(aligned[1].by == AlignedClock::By::kWallClock);
  CHECK(aligned[1].offset_us == Approx(2000));
  CHECK_FALSE(aligned[1].error_us.has_value());
}

// ---- Files

std::string About(const std::string& who, int number, const std::string& clock, double steady_us,
                  const std::string& job = "default") {
  const Json event = {{"name", "ps_process"},
                      {"ph", "M"},
                      {"pid", 1},
                      {"tid", 0},
                      {"args",
                       {{"program", "p"},
                        {who, number},
                        {"job", job},
                        {"host", "host-" + clock},
                        {"clock", clock},
                        {"steady_ns", steady_us * 1e3},
                        {"unix_s", steady_us / 1e6}}}};
  return event.dump() + ",\n";
}

std::string Arrow(const char* phase, const std::string& id, double ts) {
  const Json event = {{"name", "push"}, {"cat", "push"}, {"ph", phase}, {"pid", 1}, {"tid", 1}, {"ts", ts}, {"id", id}};
  return event.dump() + ",\n";
}

std::string Span(const std::string& name, double ts, double dur) {
  const Json event = {{"name", name}, {"ph", "X"}, {"pid", 1}, {"tid", 1}, {"ts", ts}, {"dur", dur}};
  return event.dump() + ",\n";
}

class Traces {
 public:
  std::string Add(const std::string& text) {
    paths.push_back(folder.File(std::to_string(paths.size()) + ".json"));
    std::ofstream(paths.back()) << text;
    return paths.back();
  }
  // The merged trace.
  Json Merge() {
    const absl::StatusOr<std::string> done = MergeTraces(paths, folder.File("merged.json"));
    INFO(done.status());
    REQUIRE(done.ok());
    said = *done;
    return Json::parse(ReadFile(folder.File("merged.json")));
  }
  std::string Refusal() { return Message(MergeTraces(paths, folder.File("merged.json")).status()); }

  TempFolder folder;
  std::vector<std::string> paths;
  std::string said;
};

Json Find(const Json& merged, const std::string& name) {
  for (const Json& event : merged["traceEvents"]) {
    if (event["name"] == name) return event;
  }
  FAIL("no event " << name);
  return {};
}

TEST_CASE("Merged traces are one valid trace, servers first, with times of the chief's clock") {
  Traces traces;
  traces.Add("[\n" + About("rank", 1, "b", 500) + Span("push 0", 100, 10) + Arrow("s", "0x1", 100) +
             Span("pull", 300, 20) + Arrow("f", "0x1", 319.999) + R"({"name":"ps_end","ph":"M"})" + "\n]\n");
  traces.Add("[\n" + About("shard", 0, "a", 90000) + Span("arrives", 1000, 40) + Arrow("t", "0x1", 1039.999) +
             Span("apply", 1050, 100) + Arrow("t", "0x1", 1149.999));
  const Json merged = traces.Merge();
  CHECK(Find(merged, "apply")["pid"] == 1);
  CHECK(Find(merged, "push 0")["pid"] == 2);
  // The push was complete within 40 us, and back 20 us after it was applied at the latest: 110 us are open.
  const double push = Find(merged, "push 0")["ts"];
  const double apply = Find(merged, "apply")["ts"];
  CHECK(push < apply);
  CHECK(apply + 100 < Find(merged, "pull")["ts"].get<double>() + 20);
  CHECK(merged["otherData"]["processes"][1]["error_us"].get<double>() == Approx((220.0 - 110) / 2).margin(0.01));
  CHECK(traces.said.find("rank 1 on host-b: its clock aligned by pushes, within 0.055 ms") != std::string::npos);
  for (const Json& event : merged["traceEvents"]) CHECK(event["name"] != "ps_end");
}

TEST_CASE("A trace whose process was killed while it wrote is merged up to there") {
  Traces traces;
  traces.Add("[\n" + About("shard", 0, "a", 0) + Span("apply", 5, 1) + R"({"name":"x","ph":"X","t)");
  const Json merged = traces.Merge();
  CHECK(Find(merged, "apply")["dur"] == 1.0);
  CHECK(traces.said.find("its last event is cut off") != std::string::npos);
}

TEST_CASE("Arrows of which only one end is among the files are left out") {
  Traces traces;
  traces.Add("[\n" + About("shard", 0, "a", 0) + Span("apply", 5, 1) + Arrow("t", "0x1", 5));
  for (const Json& event : traces.Merge()["traceEvents"]) CHECK(event["ph"] != "t");
}

TEST_CASE("Of traces that are too large together the beginning is merged, and it is said how much of all that is") {
  Traces traces;
  std::string text = "[\n" + About("shard", 0, "a", 0);
  for (int i = 0; i < 1000; ++i) text += Span("apply " + std::to_string(i), 100e3 * i, 50e3);
  traces.Add(text);
  const std::string output = traces.folder.File("merged.json");
  const absl::StatusOr<std::string> done = MergeTraces(traces.paths, output, 30'000);
  REQUIRE(done.ok());
  const std::string written = ReadFile(output);
  const Json merged = Json::parse(written);
  CHECK(written.size() < 32'000);
  CHECK(written.size() > 20'000);
  size_t spans = 0;
  for (const Json& event : merged["traceEvents"]) {
    if (event["ph"] == "X") CHECK(event["name"] == "apply " + std::to_string(spans++));
  }
  const std::string part = merged["otherData"]["part"];
  CHECK(part.find(" s of 99.91 s") != std::string::npos);
  CHECK(done->find("  It has the first ") != std::string::npos);
}

TEST_CASE("What is no trace is refused, by file and line") {
  Traces traces;
  const std::string path = traces.Add("[\n" + About("shard", 0, "a", 0) + "nonsense\n" + Span("apply", 5, 1));
  CHECK(traces.Refusal() == path + ":3: expected one of a trace's events");
  Traces others;
  const std::string other = others.Add("[\n" + Span("apply", 5, 1));
  CHECK(others.Refusal().find(other + ": it is no trace of a ps_server or ps_worker") == 0);
  Traces missing;
  missing.paths = {missing.folder.File("none")};
  CHECK(missing.Refusal() == missing.paths[0] + ": the file cannot be read");
}

TEST_CASE("Traces of different jobs are not merged") {
  Traces traces;
  const std::string first = traces.Add("[\n" + About("shard", 0, "a", 0, "one"));
  const std::string second = traces.Add("[\n" + About("rank", 0, "a", 0, "two"));
  CHECK(traces.Refusal() == second + ": it is of the job two, and " + first + " of one");
}

TEST_CASE("A merged trace takes the place of none of those that it is made of") {
  Traces traces;
  const std::string path = traces.Add("[\n" + About("shard", 0, "a", 0));
  CHECK(Message(MergeTraces(traces.paths, path).status()) == "--output=" + path + ": is one of the files to be merged");
  CHECK(ReadFile(path).find("ps_process") != std::string::npos);
}

}  // namespace
}  // namespace ps
