#include "common/history/metrics_files.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/history/job_json.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

constexpr size_t kAll = 1 << 30;
constexpr double kBegan = 1'700'000'000;

std::string WorkerStart(int rank, const std::string& mode, double t = 0) {
  return absl::StrFormat(
      R"({"event":"start","t":%g,"rank":%d,"unix_time":%.3f,"program_version":"%s","host":"h%d","mode":"%s",)"
      R"("generation":1,"flags":{"name":"w%d"}})"
      "\n",
      t, rank, kBegan + t, PS_VERSION, rank, mode, rank);
}

std::string ServerStart(const std::string& mode) {
  return absl::StrFormat(
      R"({"event":"start","t":0,"shard":0,"unix_time":%.3f,"program_version":"%s","host":"s","mode":"%s",)"
      R"("generation":1,"flags":{"optimizer":"sgd","learning_rate":"0.1","num_workers":"2","num_shards":"1"}})"
      "\n",
      kBegan, PS_VERSION, mode);
}

std::string StepLine(int rank, int step, double t, double wait_s = 0, const std::string& loss = "0.5") {
  return absl::StrFormat(
      R"({"event":"step","t":%g,"rank":%d,"step":%d,"version":%d,"loss":%s,"samples":64,"forward_s":0.01,)"
      R"("backward_s":0.02,"push_s":0.01,"wait_s":%g,"pull_s":0.01})"
      "\n",
      t, rank, step, step, loss, wait_s);
}

class Folder {
 public:
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  const std::string& path() const { return folder_.path(); }
  void Append(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::app) << text;
  }

 private:
  TempFolder folder_;
};

std::string EventsOf(const MetricsReader& reader) {
  std::string all;
  for (const Event& event : reader.history().events().newest())
    absl::StrAppend(&all, event.kind, ": ", event.text, "\n");
  return all;
}

TEST_CASE("A finished run's files come to the job that the chief would have told") {
  Folder folder;
  folder.Append("server-0.jsonl", ServerStart("bsp"));
  folder.Append("w0.jsonl", WorkerStart(0, "bsp"));
  folder.Append("w1.jsonl", WorkerStart(1, "bsp"));
  for (int step = 0; step < 100; ++step) {
    const double t = 1 + step * 0.1;
    // Rank 1 pushes 0.06 s after rank 0, which waits for it.
    folder.Append("w0.jsonl", StepLine(0, step, t, 0.06));
    folder.Append("w1.jsonl", StepLine(1, step, t, 0));
    folder.Append("server-0.jsonl",
                  absl::StrFormat(R"({"event":"apply","t":%g,"shard":0,"version":%d,"contributions":2,"ranks":[0,1],)"
                                  R"("samples":[64,64],"staleness":[0,0],"position":%d,"apply_s":0.002,)"
                                  R"("learning_rate":0.1})"
                                  "\n",
                                  t, step + 1, 128 * (step + 1)));
  }
  folder.Append("w0.jsonl",
                R"({"event":"eval","t":11.2,"rank":0,"step":100,"version":100,"copied_t":11.1,"split":"test",)"
                R"("loss":0.25,"accuracy":0.9})"
                "\n");
  folder.Append("w0.jsonl", R"({"event":"end","t":11.3,"rank":0,"steps":100,"samples":6400})"
                            "\n");
  folder.Append("w1.jsonl", R"({"event":"end","t":11.3,"rank":1,"steps":100,"samples":6400})"
                            "\n");
  folder.Append("server-0.jsonl", R"({"event":"end","t":11.4,"shard":0,"version":100,"phase":"PHASE_FINISHED"})"
                                  "\n");

  MetricsReader reader("run", {folder.path()});
  const auto more = reader.Update(kAll, kBegan + 1e6);
  REQUIRE(more.ok());
  CHECK(!*more);
  const v1::StatusReply status = reader.Status();
  CHECK(status.phase() == v1::PHASE_FINISHED);
  CHECK(status.progress().step() == 100);
  CHECK(status.progress().samples() == 12'800);
  CHECK(status.progress().running_s() == Approx(10.46).margin(0.5));
  CHECK(status.settings().at("mode") == "bsp");
  CHECK(status.settings().at("optimizer") == "sgd");
  REQUIRE(status.workers_size() == 2);
  CHECK(status.workers(0).name() == "w0");
  CHECK(status.workers(0).done());
  CHECK(status.workers(0).held_up_s() == 0);
  CHECK(status.workers(1).held_up_s() == Approx(6).epsilon(0.01));
  CHECK(status.workers(0).report().seconds().wait() == Approx(6));
  CHECK(status.workers(1).report().samples() == 6400);
  REQUIRE(status.shard_status_size() == 1);
  CHECK(status.shard_status(0).updates() == 100);
  CHECK(status.shard_status(0).applied_samples() == 12'800);
  CHECK(status.shard_status(0).staleness().counts(0) == 200);
  CHECK(status.progress().evaluations(0).accuracy() == 0.9);
  CHECK(reader.history().Find("loss")->size() > 50);
  CHECK(reader.history().Find("accuracy.test")->size() == 1);
  const Series& rate = *reader.history().Find("samples_per_s");
  CHECK(rate.at(rate.size() - 2).mean == Approx(1280).epsilon(0.05));
  CHECK(EventsOf(reader).find("evaluation: test: accuracy 90.0 %, loss 0.25 at step 100\n") != std::string::npos);
  CHECK(EventsOf(reader).find("phase: the job is finished\n") != std::string::npos);
  CHECK(EventsOf(reader).find("problem") == std::string::npos);
}

TEST_CASE("Files that grow are read on from where they were, and a line without its end waits for it") {
  Folder folder;
  folder.Append("w0.jsonl", WorkerStart(0, "asp") + StepLine(0, 0, 1));
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 1).ok());
  CHECK(reader.Status().progress().step() == 1);
  const std::string cursor = reader.history().SeriesJson("")["cursor"];
  const std::string line = StepLine(0, 1, 1.5);
  folder.Append("w0.jsonl", line.substr(0, 40));
  REQUIRE(reader.Update(kAll, kBegan + 1.5).ok());
  CHECK(reader.Status().progress().step() == 1);
  folder.Append("w0.jsonl", line.substr(40));
  folder.Append("w1.jsonl", WorkerStart(1, "asp") + StepLine(1, 0, 1.6));  // Another file comes later.
  REQUIRE(reader.Update(kAll, kBegan + 2).ok());
  CHECK(reader.Status().progress().step() == 2);
  CHECK(reader.Status().workers_size() == 2);
  CHECK(reader.history().SeriesJson(cursor)["series"]["loss"]["reset"] == false);
  CHECK(EventsOf(reader).find("problem") == std::string::npos);
}

TEST_CASE("Reading in pieces comes to the same as reading at once") {
  Folder folder;
  folder.Append("w0.jsonl", WorkerStart(0, "asp"));
  folder.Append("w1.jsonl", WorkerStart(1, "asp"));
  for (int step = 0; step < 2000; ++step) {
    folder.Append("w0.jsonl", StepLine(0, step, 1 + step * 0.01));
    if (step % 3 == 0) folder.Append("w1.jsonl", StepLine(1, step / 3, 1 + step * 0.01));
  }
  MetricsReader whole("run", {folder.path()});
  REQUIRE(whole.Update(kAll, kBegan + 22).ok());
  MetricsReader pieces("run", {folder.path()});
  int calls = 0;
  for (bool more = true; more && calls < 1000; ++calls) more = *pieces.Update(20'000, kBegan + 22);
  CHECK(calls > 10);
  CHECK(pieces.Status().progress().samples() == whole.Status().progress().samples());
  CHECK(pieces.Status().workers(1).report().seconds().forward() ==
        whole.Status().workers(1).report().seconds().forward());
  // A third of the steps: slow.
  CHECK(whole.Status().workers(1).slow());
  CHECK(!whole.Status().workers(0).slow());
  CHECK(EventsOf(whole).find("slow: rank 1 (w1 on h1) is slow") != std::string::npos);
}

TEST_CASE("What cannot be read is said and passed over") {
  Folder folder;
  std::string start = WorkerStart(0, "bsp");
  start.replace(start.find(PS_VERSION), std::string(PS_VERSION).size(), "9.9.9");
  folder.Append("w0.jsonl", "no JSON\n[1]\n" + start +
                                R"({"event":"hologram","t":0.5,"rank":0})"
                                "\n" +
                                R"({"event":"step","t":"late","rank":0})"
                                "\n" +
                                StepLine(0, 0, 1, 0, "null") +
                                R"({"event":"step","t":1.1,"rank":"zero","step":{}})"
                                "\n" +
                                StepLine(0, 1, 1.5).substr(0, 20));
  folder.Append("empty.jsonl", "");
  folder.Append("notes.txt", "not a metrics file\n");
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 2).ok());
  CHECK(reader.Status().progress().step() == 1);
  CHECK(std::isnan(reader.Status().progress().loss().mean()));  // null: it was not finite.
  const std::string events = EventsOf(reader);
  CHECK(events.find("w0.jsonl:1: expected one JSON object a line, found: no JSON\n") != std::string::npos);
  CHECK(events.find("written by version 9.9.9; this program is version") != std::string::npos);
  CHECK(events.find("this program knows no events 'hologram'; they are passed over\n") != std::string::npos);
  CHECK(events.find("a line without `event` and `t`") != std::string::npos);
  CHECK(events.find("a line says of no worker and no server") != std::string::npos);
}

TEST_CASE("A run that went back to a checkpoint goes on from there, whoever says it first") {
  Folder folder;
  const std::string again = R"({"event":"start","t":5,"shard":0,"unix_time":1700000005,"mode":"bsp","generation":2})"
                            "\n";
  folder.Append("server.jsonl", ServerStart("bsp") + again);
  folder.Append("w0.jsonl", WorkerStart(0, "bsp"));
  for (int step = 0; step < 20; ++step) folder.Append("w0.jsonl", StepLine(0, step, 1 + step * 0.1));
  folder.Append("w0.jsonl", R"({"event":"rollback","t":5.5,"rank":0,"generation":2,"step":10,"version":10})"
                            "\n" +
                                StepLine(0, 10, 6));
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 6).ok());
  CHECK(reader.Status().progress().step() == 11);
  CHECK(reader.Status().progress().rollbacks() == 1);
  CHECK(EventsOf(reader).find("rollback: the job went back to a checkpoint: generation 2") != std::string::npos);
}

TEST_CASE("Times that cannot be are no reason to end") {
  Folder folder;
  folder.Append("w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1e300) + StepLine(0, 1, -1e300) + StepLine(0, 2, 1));
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 2).ok());
  CHECK(reader.Status().progress().step() == 3);
  CHECK(EventsOf(reader).find("its time cannot be") != std::string::npos);
}

TEST_CASE("A folder that is not there, or has no metrics file, is an error, and files may come later") {
  Folder folder;
  CHECK(MetricsReader("run", {folder.path("none")}).Update(kAll, kBegan).status().code() ==
        absl::StatusCode::kNotFound);
  MetricsReader reader("run", {folder.path()});
  CHECK(reader.Update(kAll, kBegan).status().code() == absl::StatusCode::kNotFound);
  folder.Append("w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1));
  REQUIRE(reader.Update(kAll, kBegan + 1).ok());
  CHECK(reader.Status().progress().step() == 1);
}

TEST_CASE("A file that another run has taken over is read anew, and readers are told everything again") {
  Folder folder;
  folder.Append("w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1) + StepLine(0, 1, 1.1));
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 2).ok());
  const std::string cursor = reader.history().SeriesJson("")["cursor"];
  std::filesystem::resize_file(folder.path("w0.jsonl"), 0);
  folder.Append("w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1));
  REQUIRE(reader.Update(kAll, kBegan + 3).ok());
  CHECK(reader.Status().progress().step() == 1);
  CHECK(reader.history().SeriesJson(cursor)["series"]["loss"]["reset"] == true);
}

TEST_CASE("A run that writes nothing any more is stuck, and its curves end a little after it") {
  Folder folder;
  folder.Append("w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1) + StepLine(0, 1, 1.1));
  MetricsReader reader("run", {folder.path()});
  REQUIRE(reader.Update(kAll, kBegan + 86'400).ok());
  CHECK(Headline(reader.Status()).find("no step is written for 23 h 60 min") == std::string::npos);
  CHECK(Headline(reader.Status()).find("no step is written for 24 h 0 min") != std::string::npos);
  const Series& rate = *reader.history().Find("samples_per_s");
  CHECK(rate.at(rate.size() - 1).t < 30);
}

TEST_CASE("Earlier runs are the folders with metrics files, and no name leads out of their folder") {
  Folder folder;
  folder.Append("before/w0.jsonl", WorkerStart(0, "bsp") + StepLine(0, 0, 1));
  folder.Append("nothing/notes.txt", "x");
  folder.Append("w0.jsonl", WorkerStart(0, "bsp"));
  EarlierRuns runs(folder.path());
  CHECK(runs.Names() == std::vector<std::string>{"before"});
  const auto series = runs.SeriesJson("before", "", kBegan + 2);
  REQUIRE(series.ok());
  CHECK((*series)["series"]["loss"]["points"].size() == 1);
  CHECK(runs.SeriesJson("..", "", kBegan).status().code() == absl::StatusCode::kNotFound);
  CHECK(runs.SeriesJson("../before", "", kBegan).status().code() == absl::StatusCode::kNotFound);
  CHECK_FALSE((*series)["more"]);
  CHECK(EarlierRuns("").Names().empty());
  CHECK(EarlierRuns(folder.path(), folder.path("before/w0.jsonl")).Names().empty());  // It goes on now.
  CHECK(EarlierRuns(folder.path("none")).Names().empty());
}

TEST_CASE("Lines that say nothing are read in pieces, too") {
  Folder folder;
  std::string lines;
  for (int step = 0; step < 20'000; ++step) lines += StepLine(0, step, 1);
  folder.Append("w0.jsonl", lines + WorkerStart(0, "bsp") + StepLine(0, 0, 1));  // The first of them have no start.
  MetricsReader reader("run", {folder.path()});
  int pieces = 1;
  absl::StatusOr<bool> more = reader.Update(1000, kBegan + 2);
  for (; more.ok() && *more; ++pieces) more = reader.Update(1000, kBegan + 2);
  REQUIRE(more.ok());
  CHECK(pieces > 3);
  CHECK(reader.Status().progress().step() == 1);
}

TEST_CASE("Only so many earlier runs are looked at at the same time, and another one when one is left") {
  Folder folder;
  for (size_t i = 0; i <= EarlierRuns::kMaxKept; ++i) {
    folder.Append(absl::StrCat("run-", i, "/w0.jsonl"), WorkerStart(0, "bsp") + StepLine(0, 0, 1));
  }
  EarlierRuns runs(folder.path());
  for (size_t i = 0; i < EarlierRuns::kMaxKept; ++i) {
    CHECK(runs.SeriesJson(absl::StrCat("run-", i), "", kBegan + 100).ok());
  }
  const std::string last = absl::StrCat("run-", EarlierRuns::kMaxKept);
  CHECK(runs.SeriesJson(last, "", kBegan + 105).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK(runs.SeriesJson("run-0", "", kBegan + 111).ok());
  CHECK(runs.SeriesJson(last, "", kBegan + 111).ok());  // In the place of run-1, at which nobody has looked for long.
}

}  // namespace
}  // namespace ps
