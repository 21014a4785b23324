#include "worker/ctl/report.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/catch.h"

namespace ps {
namespace {

std::string Fixture(const std::string& name) { return absl::StrCat(PS_REPORT_TEST_DATA, "/", name); }

// A folder of metrics files that goes away with the test.
class TempRun {
 public:
  TempRun() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ps_report_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
  }
  ~TempRun() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  TempRun(const TempRun&) = delete;
  TempRun& operator=(const TempRun&) = delete;

  void Write(const std::string& file, const std::string& text) const { std::ofstream(folder_ + "/" + file) << text; }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

const std::string worker_start = R"({"event":"start","t":0,"rank":0,"unix_time":100})"
                                 "\n";
const std::string server_start = R"({"event":"start","t":0,"shard":0,"unix_time":100,"flags":{"mode":"asp"}})"
                                 "\n";

std::string Step(double t, int rank) {
  return absl::StrCat(R"({"event":"step","t":)", t, R"(,"rank":)", rank,
                      R"(,"samples":30,"forward_s":1,"backward_s":0,"push_s":0,"wait_s":0,"pull_s":0})", "\n");
}

// What SummarizeRun says about a folder with this one file.
absl::Status ErrorOf(const std::string& text) {
  TempRun run;
  run.Write("bad.jsonl", text);
  return SummarizeRun(run.folder()).status();
}

void RequireMessage(const absl::Status& status, const std::string& part) {
  const std::string message(status.message().data(), status.message().size());
  INFO(message);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(message.find(part) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("A run's files are aligned by their clocks and summarized") {
  const absl::StatusOr<RunSummary> run = SummarizeRun(Fixture("two-workers-asp"));
  INFO(run.status());
  REQUIRE(run.ok());
  CHECK(run->name == "two-workers-asp");
  CHECK(run->mode == "asp");  // One of the shards says "async".
  CHECK(run->workers == 2);
  CHECK(run->final_test_accuracy.value() == Approx(0.874));
  // The training starts with rank 1's first step, at 1001.8; rank 0 is at 80 % at 1007 and at 85 % at 1010.
  CHECK(run->seconds_to_target[0].value() == Approx(5.2));
  CHECK(run->seconds_to_target[1].value() == Approx(8.2));
  CHECK(run->samples_per_s.value() == Approx(2701));
}

TEST_CASE("Staleness counts every contribution of every shard") {
  const absl::StatusOr<RunSummary> run = SummarizeRun(Fixture("two-workers-asp"));
  REQUIRE(run.ok());
  REQUIRE(run->staleness.has_value());  // The values are 0, 0, 1, 1, 2, 5.
  CHECK(run->staleness->p50 == 1);
  CHECK(run->staleness->p99 == 5);
  CHECK(run->staleness->max == 5);
}

TEST_CASE("The shares of the workers' time are of the sum of all of their steps") {
  const absl::StatusOr<RunSummary> run = SummarizeRun(Fixture("two-workers-asp"));
  REQUIRE(run.ok());
  REQUIRE(run->time_shares.has_value());  // The steps took 0.9 s.
  CHECK(run->time_shares->compute == Approx(0.5 / 0.9));
  CHECK(run->time_shares->push == Approx(0.2 / 0.9));
  CHECK(run->time_shares->wait == Approx(0.05 / 0.9));
  CHECK(run->time_shares->pull == Approx(0.15 / 0.9));
}

TEST_CASE("A killed worker's cut-off last line is passed over and its steps give the rate") {
  const absl::StatusOr<RunSummary> run = SummarizeRun(Fixture("one-worker-bsp") + "/");
  INFO(run.status());
  REQUIRE(run.ok());
  CHECK(run->name == "one-worker-bsp");
  CHECK(run->mode == "bsp");
  CHECK(run->samples_per_s.value() == Approx(200 / 2.0));  // From 1.0 to 3.0 s.
  CHECK(run->time_shares->compute == Approx(1.0 / 1.5));
  CHECK_FALSE(run->final_test_accuracy.has_value());
  CHECK_FALSE(run->seconds_to_target[0].has_value());
}

TEST_CASE("A worker that never ended counts with its steps beside one that did") {
  TempRun run;
  run.Write("a.jsonl", worker_start + Step(1, 0) + Step(3, 0) +
                           R"({"event":"end","t":3,"rank":0,"steps":2,"samples":60,"samples_per_s":20})"
                           "\n");
  run.Write("b.jsonl", worker_start + Step(2, 1));
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->samples_per_s.value() == Approx(90 / 3.0));
}

TEST_CASE("Percentiles are nearest-rank") {
  TempRun run;
  std::string text = server_start;
  for (int value = 200; value >= 1; --value) {
    absl::StrAppend(&text, R"({"event":"apply","t":1,"shard":0,"staleness":[)", value, "]}\n");
  }
  run.Write("server.jsonl", text);
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->staleness->p50 == 100);
  CHECK(summary->staleness->p99 == 198);
  CHECK(summary->staleness->max == 200);
}

TEST_CASE("The last evaluation is the latest by time even when rank 0 had two owners") {
  const auto eval = [](double t, double accuracy) {
    return absl::StrCat(R"({"event":"eval","t":)", t, R"(,"rank":0,"split":"test","accuracy":)", accuracy, "}\n");
  };
  TempRun run;
  run.Write("a-second-owner.jsonl", worker_start + eval(50, 0.9));
  run.Write("b-first-owner.jsonl", worker_start + Step(1, 0) + eval(10, 0.81));
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->final_test_accuracy == 0.9);
  CHECK(summary->seconds_to_target[0] == 10.0);
  CHECK(summary->seconds_to_target[1] == 50.0);
}

TEST_CASE("A target is reached when the weights were copied, not when they had been evaluated") {
  TempRun run;
  run.Write("rank-0.jsonl", worker_start + Step(1, 0) +
                                R"({"event":"eval","t":9,"rank":0,"copied_t":5,"split":"test","accuracy":0.81})"
                                "\n");
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->seconds_to_target[0] == 5.0);
}

TEST_CASE("Evaluations count whoever made them: another rank leads where rank 0 was lost") {
  TempRun run;
  run.Write("rank-0.jsonl", worker_start + Step(1, 0) +
                                R"({"event":"eval","t":5,"rank":0,"split":"test","accuracy":0.81})"
                                "\n");
  run.Write("rank-1.jsonl", R"({"event":"start","t":0,"rank":1,"unix_time":100})"
                            "\n" +
                                Step(1, 1) +
                                R"({"event":"eval","t":9,"rank":1,"split":"test","accuracy":0.9})"
                                "\n");
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->final_test_accuracy == 0.9);
}

TEST_CASE("A file that a worker went on with in a running job is read with both processes' clocks") {
  const std::string start = R"({"event":"start","t":0,"rank":0,"generation":7,"unix_time":)";
  const std::string end = R"({"event":"end","t":3,"rank":0,"samples_per_s":1000})"
                          "\n";
  const std::string eval = R"({"event":"eval","t":2,"rank":0,"split":"test","accuracy":0.9})"
                           "\n";
  TempRun run;
  run.Write("a.jsonl", start + "100}\n" + Step(1, 0) + end + start + "150}\n" + Step(1, 0) + eval + end);
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK(summary->workers == 1);
  CHECK(summary->seconds_to_target[0].value() > 50);
  CHECK(summary->samples_per_s.value() < 1000);  // Over the whole time, not the sum of two that had it in turns.
  const std::string other = R"({"event":"start","t":0,"rank":0,"generation":6,"unix_time":150})"
                            "\n";
  RequireMessage(ErrorOf(start + "100}\n" + other), "a second 'start'");
}

TEST_CASE("A regression's evaluations have no accuracy, and its run has none") {
  TempRun run;
  run.Write("a.jsonl",
            worker_start + Step(1, 0) + R"({"event":"eval","t":2,"rank":0,"split":"test","loss":0.5})" + "\n");
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  REQUIRE(summary.ok());
  CHECK_FALSE(summary->final_test_accuracy.has_value());
}

TEST_CASE("Unknown events and fields are passed over") {
  TempRun run;
  run.Write("server.jsonl", server_start + R"({"event":"checkpoint","t":1,"shard":0,"bytes":[1]})"
                                           "\n");
  CHECK(SummarizeRun(run.folder()).ok());
}

TEST_CASE("A malformed line is named by its file and number") {
  RequireMessage(ErrorOf(worker_start + "{\"event\":\n" + Step(1, 0)), "bad.jsonl:2: expected one JSON object a line");
  RequireMessage(ErrorOf(worker_start + "\n"), "bad.jsonl:2: ");
  RequireMessage(ErrorOf(worker_start + "[1]\n"), "bad.jsonl:2: ");
  RequireMessage(ErrorOf(worker_start + "\"\xff\"\n"), "bad.jsonl:2: ");
}

TEST_CASE("A field that is missing or of the wrong kind is named with what was found") {
  RequireMessage(ErrorOf(worker_start + R"({"t":1,"rank":0})"
                                        "\n"),
                 "bad.jsonl:2: there is no field 'event'");
  RequireMessage(ErrorOf(worker_start + R"({"event":"step","rank":0})"
                                        "\n"),
                 "has no field 't'");
  RequireMessage(ErrorOf(worker_start + R"({"event":"step","t":1,"rank":0,"forward_s":"x"})"
                                        "\n"),
                 R"('forward_s' is "x", expected a number)");
  RequireMessage(ErrorOf(worker_start + R"({"event":"step","t":1,"rank":-1})"
                                        "\n"),
                 "'rank' is -1");
  RequireMessage(ErrorOf(worker_start + R"({"event":"eval","t":1,"rank":0,"split":"test","accuracy":87.4})"
                                        "\n"),
                 "'accuracy' is 87.4, expected a number from 0 to 1");
  RequireMessage(ErrorOf(server_start + R"({"event":"apply","t":1,"shard":0,"staleness":[0,null]})"
                                        "\n"),
                 "'staleness' holds null");
  RequireMessage(ErrorOf(R"({"event":"start","t":0,"rank":0})"
                         "\n"),
                 "has no field 'unix_time'");
}

TEST_CASE("A worker's file goes on when its job is rolled back, and steps that were made twice count twice") {
  const std::string start = R"({"event":"start","t":0,"rank":0,"unix_time":100,"generation":)";
  const std::string rollback = R"({"event":"rollback","t":2,"rank":0,"generation":8,"step":4,"version":4})"
                               "\n";
  TempRun run;
  run.Write("a.jsonl", start + "7}\n" + Step(1, 0) + rollback + Step(3, 0) + start + "8}\n" + Step(4, 0));
  const absl::StatusOr<RunSummary> summary = SummarizeRun(run.folder());
  INFO(summary.status().ToString());
  REQUIRE(summary.ok());
  CHECK(summary->samples_per_s.value() > 0);
  RequireMessage(ErrorOf(start + "7}\n" + rollback + start + "7}\n"), "a second 'start'");
}

TEST_CASE("A file that is not one process's is refused") {
  RequireMessage(ErrorOf(Step(1, 0)), "bad.jsonl:1: the first line is 'step', expected 'start'");
  RequireMessage(ErrorOf(worker_start + worker_start), "a second 'start'");
  RequireMessage(ErrorOf(worker_start + R"({"event":"apply","t":1,"shard":0,"staleness":0})"
                                        "\n"),
                 "mixed");
  RequireMessage(ErrorOf(R"({"event":"start","t":0,"unix_time":1})"
                         "\n"),
                 "either a field 'rank'");
}

TEST_CASE("A folder with two runs is refused") {
  TempRun run;
  run.Write("a.jsonl", server_start);
  run.Write("b.jsonl", R"({"event":"start","t":0,"shard":0,"unix_time":100,"flags":{"mode":"bsp"}})"
                       "\n");
  const absl::Status status = SummarizeRun(run.folder()).status();
  RequireMessage(status, "b.jsonl:1: the mode is 'bsp', but 'asp' in ");
  RequireMessage(status, "a.jsonl:1");
}

TEST_CASE("A folder without events is not found") {
  TempRun run;
  CHECK(absl::IsNotFound(SummarizeRun(run.folder() + "/absent").status()));
  CHECK(absl::IsNotFound(SummarizeRun(run.folder()).status()));
  run.Write("cut.jsonl", R"({"event":"start","t)");
  CHECK(absl::IsNotFound(SummarizeRun(run.folder()).status()));
}

TEST_CASE("The table is aligned and marks what is not known") {
  RunSummary full;
  full.name = "demo-bsp";
  full.mode = "bsp";
  full.workers = 2;
  full.final_test_accuracy = 0.8741;
  full.seconds_to_target = {12.34, std::nullopt};
  full.samples_per_s = 54321.4;
  full.staleness = StalenessSummary{0, 1, 12};
  full.time_shares = TimeShares{0.5, 0.25, 0.2, 0.05};
  RunSummary empty;
  empty.name = "a|b";
  CHECK(
      FormatTable({full, empty}) ==
      "| run      | mode | workers | test accuracy | to 80 % | to 85 % | samples/s | staleness p50/p99/max | compute | "
      "push | wait | pull |\n"
      "|:---------|:-----|--------:|--------------:|--------:|--------:|----------:|----------------------:|--------:|"
      "-----:|-----:|-----:|\n"
      "| demo-bsp | bsp  |       2 |        87.4 % |  12.3 s |       — |     54321 |            0 / 1 / 12 |    50 % | "
      "25 % | 20 % |  5 % |\n"
      "| a\\|b     | —    |       0 |             — |       — |       — |         — |                     — |       — "
      "| "
      "   — |    — |    — |\n");
}

}  // namespace
}  // namespace ps
