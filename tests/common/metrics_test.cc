#include "common/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

std::vector<std::string> EventsIn(const std::string& path) {
  std::vector<std::string> events;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) events.push_back(nlohmann::json::parse(line)["event"]);
  return events;
}

TEST_CASE("A metrics file keeps what it holds until its writer has its place in the job") {
  const TempFolder folder;
  const std::string path = folder.File("m.jsonl");
  std::ofstream(path) << "of the last run\n";
  {
    const auto refused = MetricsWriter::Open(path, "rank");
    REQUIRE(refused.ok());
    (*refused)->Write("step", {});
  }
  CHECK(ReadFile(path) == "of the last run\n");
  {
    const auto writer = MetricsWriter::Open(path, "rank");
    REQUIRE(writer.ok());
    (*writer)->Write("early", {});
    (*writer)->Begin(/*append=*/false, StartFields());
    (*writer)->Write("step", {});
  }
  CHECK(EventsIn(path) == std::vector<std::string>{"start", "early", "step"});
}

TEST_CASE("A writer that appends to a metrics file begins after its last complete line") {
  const TempFolder folder;
  const std::string path = folder.File("m.jsonl");
  for (const std::string before : {"{\"event\":\"step\"}\n{\"event\":\"st", "{\"event\":\"step\"}\n"}) {
    std::ofstream(path) << before;
    (*MetricsWriter::Open(path, "rank"))->Begin(/*append=*/true, {});
    CHECK(EventsIn(path) == std::vector<std::string>{"step", "start"});
  }
  std::ofstream(path) << "torn";
  (*MetricsWriter::Open(path, "rank"))->Begin(/*append=*/true, {});
  CHECK(EventsIn(path) == std::vector<std::string>{"start"});
}

TEST_CASE("A metrics file that is being written is refused to a second writer, by its flag") {
  const TempFolder folder;
  const std::string path = folder.File("m.jsonl");
  auto first = MetricsWriter::Open(path, "shard");
  REQUIRE(first.ok());
  (*first)->Begin(/*append=*/false, {});
  const std::string expected = "--metrics_file=" + path + ": another running process is writing this file";
  CHECK(Message(MetricsWriter::Open(path, "shard").status()) == expected);
  first->reset();
  CHECK(EventsIn(path) == std::vector<std::string>{"start"});
  CHECK(MetricsWriter::Open(path, "shard").ok());
  const std::string nowhere = folder.File("no/m.jsonl");
  CHECK(Message(MetricsWriter::Open(nowhere, "shard").status()).find("--metrics_file=" + nowhere + ": ") == 0);
}

TEST_CASE("A FIFO that nobody reads delays neither the opening nor the events, and a reader gets what was kept") {
  const TempFolder folder;
  const std::string path = folder.File("fifo");
  REQUIRE(mkfifo(path.c_str(), 0666) == 0);
  const auto writer = MetricsWriter::Open(path, "rank");
  REQUIRE(writer.ok());
  (*writer)->Begin(/*append=*/false, {{"note", "here"}});
  const TimePoint began = Now();
  for (int i = 0; i < 100000; ++i) (*writer)->Write("step", {{"step", i}});
  CHECK(Now() - began < std::chrono::minutes(2));
  const int reader = open(path.c_str(), O_RDONLY);
  char some[200] = {};
  REQUIRE(read(reader, some, sizeof(some) - 1) > 0);
  CHECK(std::string(some).find(R"({"event":"start")") == 0);
  close(reader);
}

TEST_CASE("Metrics with text that is no UTF-8 are written all the same") {
  const TempFolder folder;
  (*MetricsWriter::Open(folder.File("m"), "rank"))->Begin(false, {{"flags", {{"init_weights", "\xff/w"}}}});
  CHECK(EventsIn(folder.File("m")) == std::vector<std::string>{"start"});
}

}  // namespace
}  // namespace ps
