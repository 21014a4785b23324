// ps_ctl set on a running job: real programs.
#include <functional>

#include <nlohmann/json.hpp>
#include "tests/catch.h"
#include "tests/integration/process.h"

namespace ps {
namespace {

using nlohmann::json;

// Servers and workers that train until they are stopped.
class Job {
 public:
  explicit Job(const std::string& mode, uint32_t shards = 3, const std::string& lease = "10s") {
    std::string chief;
    for (uint32_t shard = 0; shard < shards; ++shard) {
      const std::string number = std::to_string(shard);
      std::vector<std::string> arguments = {"--num_workers=2",      "--mode=" + mode,
                                            "--optimizer=momentum", "--num_shards=" + std::to_string(shards),
                                            "--lease=" + lease,     "--metrics_file=" + Metrics(shard)};
      if (shard > 0) arguments.insert(arguments.end(), {"--shard=" + number, "--chief=" + chief});
      servers.push_back(std::make_unique<Process>("ps_server", arguments, folder.File("server-" + number)));
      if (shard == 0) chief = servers[0]->Address();
    }
    address = chief;
    for (const std::string rank : {"0", "1"}) {
      workers.push_back(std::make_unique<Process>("ps_worker", Worker(chief, {"--rank=" + rank, "--steps=100000000"}),
                                                  folder.File("worker-" + rank)));
    }
    REQUIRE(servers[0]->WaitFor(".err", "the job is running"));
    REQUIRE(workers[1]->WaitFor(".err", "step "));
  }

  std::string Metrics(uint32_t shard) const { return folder.File("metrics-" + std::to_string(shard) + ".jsonl"); }

  // Runs ps_ctl; what it printed goes to `output`.
  int Ctl(std::vector<std::string> arguments, std::string* output) const {
    arguments.insert(arguments.begin(), "--server=" + address);
    Process ctl("ps_ctl", arguments, folder.File("ctl"));
    const int status = ctl.Wait();
    *output = ctl.Output() + ctl.Errors();
    return status;
  }

  // The events of a shard that `wanted` picks, once there are so many. All that it writes is looked at while it writes.
  std::vector<json> Events(uint32_t shard, size_t count, const std::function<bool(const json&)>& wanted) const {
    Mutex mutex;
    CondVar never;
    MutexLock lock(mutex);
    std::vector<json> events;
    for (const TimePoint deadline = Now() + std::chrono::minutes(2); Now() < deadline && events.size() < count;) {
      events.clear();
      std::ifstream in(Metrics(shard));
      for (std::string line; std::getline(in, line);) {
        json parsed = json::parse(line, /*cb=*/nullptr, /*allow_exceptions=*/false);
        if (parsed.is_object() && wanted(parsed)) events.push_back(std::move(parsed));
      }
      never.WaitUntil(mutex, Now() + std::chrono::milliseconds(20));
    }
    return events;
  }
  std::vector<json> Sets(uint32_t shard, size_t count) const {
    return Events(shard, count, [](const json& event) { return event["event"] == "set"; });
  }
  // The event of this version.
  json Applied(uint32_t shard, uint64_t version) const {
    const std::vector<json> events = Events(
        shard, 1, [version](const json& event) { return event["event"] == "apply" && event["version"] == version; });
    return events.empty() ? json::object() : events.front();
  }

  TempFolder folder;
  std::string address;
  std::vector<std::unique_ptr<Process>> servers;
  std::vector<std::unique_ptr<Process>> workers;
};

TEST_CASE("ps_ctl set changes a running job on three servers at one version, which all of them write") {
  for (const std::string mode : {"bsp", "asp"}) {
    CAPTURE(mode);
    const Job job(mode);
    std::string output;
    REQUIRE(job.Ctl({"set", "learning_rate=0.01", "momentum=0.5"}, &output) == 0);
    INFO(output);
    const std::string begin = "learning_rate=0.01 momentum=0.5 from version ";
    REQUIRE(output.find(begin) == 0);
    const uint64_t version = std::stoull(output.substr(begin.size()));
    CHECK(output == begin + std::to_string(version) + " on\n");
    for (uint32_t shard = 0; shard < 3; ++shard) {
      const std::vector<json> sets = job.Sets(shard, 1);
      REQUIRE(sets.size() == 1);
      CHECK(sets[0]["version"] == version);
      CHECK(sets[0]["values"].dump() == R"({"learning_rate":0.01,"momentum":0.5})");
      CHECK(job.servers[shard]->WaitFor(".err", "momentum=0.5 from version " + std::to_string(version) + " on"));
    }
    CHECK(job.Ctl({"status"}, &output) == 0);
    CHECK(output.find("now: learning_rate=0.01 momentum=0.5 weight_decay=0") != std::string::npos);
  }
}

TEST_CASE("ps_ctl set replaces the schedule on three servers at one version, and status shows it with its position") {
  for (const std::string mode : {"bsp", "asp"}) {
    CAPTURE(mode);
    const Job job(mode);
    std::string output;
    CHECK(job.Ctl({"set", "schedule=cosine"}, &output) == 1);
    CHECK(output.find("--schedule_length: --schedule=cosine needs it") != std::string::npos);
    CHECK(job.Ctl({"status"}, &output) == 0);
    CHECK(output.find("\nschedule=constant; an epoch has 400 samples\n") != std::string::npos);
    // The job passed so much long ago.
    REQUIRE(job.Ctl({"set", "learning_rate=0.5", "schedule=linear", "schedule_length=1sample", "schedule_end=0.125"},
                    &output) == 0);
    INFO(output);
    const std::string begin =
        "learning_rate=0.5 schedule=linear schedule_end=0.125 schedule_length=1sample from version ";
    REQUIRE(output.find(begin) == 0);
    const uint64_t version = std::stoull(output.substr(begin.size()));
    CHECK(output == begin + std::to_string(version) + " on\n");
    for (uint32_t shard = 0; shard < 3; ++shard) {
      const std::vector<json> sets = job.Sets(shard, 1);
      REQUIRE(sets.size() == 1);
      CHECK(sets[0]["version"] == version);
      CHECK(sets[0]["schedule"] == "schedule=linear schedule_length=1samples schedule_end=0.125");
      const json made = job.Applied(shard, version);
      CHECK(made["learning_rate"] == 0.0625);
      CHECK(made["position"].get<uint64_t>() > 1);
      CHECK(job.Applied(shard, version - 1)["learning_rate"] == 0.1);
    }
    CHECK(job.Ctl({"status"}, &output) == 0);
    CHECK(output.find("\nschedule=linear schedule_length=1samples schedule_end=0.125; an epoch has 400 samples\n") !=
          std::string::npos);
    CHECK(output.find("epochs); learning rate 0.0625\n") != std::string::npos);
  }
}

TEST_CASE("ps_ctl set names every value that cannot be, and changes nothing") {
  const Job job("asp");
  std::string output;
  CHECK(job.Ctl({"set", "learning_rate=0.2", "momentum=1", "nesterov=1", "weight_decay=nan"}, &output) == 1);
  CHECK(output.find("momentum=1: expected 0 or more, below 1") != std::string::npos);
  CHECK(output.find("nesterov=1: there is no such hyperparameter") != std::string::npos);
  CHECK(output.find("weight_decay=nan: expected 0 or more") != std::string::npos);
  CHECK(job.Ctl({"set", "learning_rate"}, &output) == 2);
  CHECK(job.Ctl({"set"}, &output) == 2);
  CHECK(job.Ctl({"status"}, &output) == 0);
  CHECK(output.find("now: learning_rate=0.1 momentum=0.9 weight_decay=0") != std::string::npos);
  // The next change is the first one that there is.
  CHECK(job.Ctl({"set", "learning_rate=0.05"}, &output) == 0);
  const std::vector<json> sets = job.Sets(0, 1);
  REQUIRE(sets.size() == 1);
  CHECK(sets[0]["values"].dump() == R"({"learning_rate":0.05})");
}

// It is stopped anywhere, also in the middle of a push, which holds a cut up until the worker is lost.
TEST_CASE("ps_ctl set waits for live workers only: one that is stopped delays it until its lease ends at most") {
  const Job job("asp", 3, /*lease=*/"2s");
  job.workers[1]->Signal(SIGSTOP);
  std::string output;
  CHECK(job.Ctl({"--timeout=1m", "set", "learning_rate=0.01"}, &output) == 0);
  INFO(output);
  CHECK(output.find("learning_rate=0.01 from version ") == 0);
  for (uint32_t shard = 0; shard < 3; ++shard) CHECK(job.Sets(shard, 1).size() == 1);
}

TEST_CASE("ps_ctl set on a job that does not run yet says so") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  CheckRefused("ps_ctl", {"--server=" + server.Address(), "set", "learning_rate=0.5"}, "it is not running yet");
}

}  // namespace
}  // namespace ps
