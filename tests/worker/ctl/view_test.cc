#include "worker/ctl/view.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

constexpr char kStart[] =
    R"({"event":"start","t":0,"rank":0,"unix_time":1700000000,"host":"h","mode":"bsp","flags":{"name":"w0"}})"
    "\n";
constexpr char kStep[] =
    R"({"event":"step","t":1,"rank":0,"step":0,"version":0,"loss":0.5,"samples":64,"forward_s":0.01,"backward_s":0.02,)"
    R"("push_s":0.01,"wait_s":0,"pull_s":0.01})"
    "\n";

void WriteRun(const TempFolder& folder, const std::string& name, const std::string& text) {
  std::filesystem::create_directories(folder.File(name));
  std::ofstream(folder.File(name) + "/w0.jsonl", std::ios::app) << text;
}

TEST_CASE("A folder with metrics files is a run, a folder of such folders is several, and files are one together") {
  TempFolder folder;
  WriteRun(folder, "runs/a", kStart);
  WriteRun(folder, "other", kStart);
  const std::string a = folder.File("runs/a");
  const auto one = FindRuns({a});
  REQUIRE(one.ok());
  CHECK(*one == std::vector<RunPaths>{{.name = "a", .paths = {a}}});
  CHECK(*FindRuns({folder.File("runs")}) == std::vector<RunPaths>{{.name = "a", .paths = {a}}});
  const auto several = FindRuns({folder.File("other"), a, a});
  REQUIRE(several.ok());
  REQUIRE(several->size() == 3);
  CHECK((*several)[0].name == "other");
  CHECK((*several)[2].name == "a (2)");
  const std::string file = a + "/w0.jsonl";
  CHECK(*FindRuns({file, file}) == std::vector<RunPaths>{{.name = "a", .paths = {file, file}}});
}

TEST_CASE("What is not there, or has no metrics file, is named") {
  TempFolder folder;
  std::filesystem::create_directories(folder.File("empty"));
  CHECK(Message(FindRuns({folder.File("none")}).status()) == folder.File("none") + ": there is no such file or folder");
  CHECK(Message(FindRuns({folder.File("empty")}).status()) ==
        folder.File("empty") + ": there is no metrics file (*.jsonl), nor a folder with one");
}

TEST_CASE("The first run is shown as the job, and others beside it, as they grow") {
  TempFolder folder;
  WriteRun(folder, "now", kStart);
  WriteRun(folder, "before", std::string(kStart) + kStep);
  ViewedRuns runs(*FindRuns({folder.File("now"), folder.File("before")}));
  REQUIRE(runs.Read(1'700'000'001).ok());
  CHECK(runs.Job()["progress"]["step"] == 0);
  CHECK(runs.Job()["runs"] == nlohmann::ordered_json{"before"});
  WriteRun(folder, "now", kStep);
  REQUIRE(runs.Read(1'700'000'002).ok());
  CHECK(runs.Job()["progress"]["step"] == 1);
  CHECK((*runs.Series("", ""))["series"]["loss"]["points"].size() == 1);
  CHECK((*runs.Series("", "before"))["series"]["loss"]["points"].size() == 1);
  CHECK(runs.Series("", "never").status().code() == absl::StatusCode::kNotFound);
  CHECK(!runs.Events(0)["events"].empty());
}

}  // namespace
}  // namespace ps
