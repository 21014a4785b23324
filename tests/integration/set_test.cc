// ps_ctl set on a running job: real programs.
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include "absl/strings/str_split.h"
#include "tests/catch.h"
#include "tests/integration/events.h"
#include "tests/integration/process.h"

namespace ps {
namespace {

using nlohmann::json;

std::vector<std::string> JobFlags(const std::string& mode, const std::string& lease) {
  return {"--num_workers=2", "--optimizer=momentum", "--mode=" + mode, "--lease=" + lease};
}

// Three servers, and workers that train until they are stopped.
class Job {
 public:
  explicit Job(const std::string& mode, const std::string& lease = "10s")
      : servers(folder, kShards, JobFlags(mode, lease)) {
    for (const std::string rank : {"0", "1"}) {
      workers.push_back(std::make_unique<Process>("ps_worker",
                                                  Worker(servers.chief(), {"--rank=" + rank, "--steps=100000000"}),
                                                  folder.File("worker-" + rank)));
    }
    REQUIRE(servers[0].WaitFor(".err", "the job is running"));
    REQUIRE(workers[1]->WaitFor(".err", "step "));
  }

  // Runs ps_ctl; what it printed goes to `output`.
  int Ctl(std::vector<std::string> arguments, std::string* output) const {
    arguments.insert(arguments.begin(), "--server=" + servers.chief());
    Process ctl("ps_ctl", arguments, folder.File("ctl"));
    const int status = ctl.Wait();
    *output = ctl.Output() + ctl.Errors();
    return status;
  }
  // Sets these, which can be, and returns the version from which on all servers have them.
  uint64_t Set(const std::string& assignments) const {
    std::vector<std::string> arguments = absl::StrSplit(assignments, ' ');
    arguments.insert(arguments.begin(), "set");
    std::string output;
    const int status = Ctl(arguments, &output);
    INFO(output);
    REQUIRE(status == 0);
    const std::string begin = assignments + " from version ";
    REQUIRE(output.find(begin) == 0);
    const uint64_t version = std::stoull(output.substr(begin.size()));
    CHECK(output == begin + std::to_string(version) + " on\n");
    return version;
  }
  std::string Status() const {
    std::string output;
    CHECK(Ctl({"status"}, &output) == 0);
    return output;
  }

  // The first change that a shard has written.
  json FirstSet(uint32_t shard) const {
    return Events(shard, [](const json& event) { return event["event"] == "set"; }).front();
  }
  // The first version from this one on, and the last one before it, that a shard has written: it may have dropped some.
  json AppliedFrom(uint32_t shard, uint64_t version) const {
    return Events(shard, [&](const json& event) { return event["event"] == "apply" && event["version"] >= version; })
        .front();
  }
  json AppliedBefore(uint32_t shard, uint64_t version) const {
    return Events(shard, [&](const json& event) { return event["event"] == "apply" && event["version"] < version; })
        .back();
  }

  static constexpr uint32_t kShards = 3;
  TempFolder folder;
  ServerProcesses servers;
  std::vector<std::unique_ptr<Process>> workers;

 private:
  // At least one.
  std::vector<json> Events(uint32_t shard, const std::function<bool(const json&)>& wanted) const {
    std::vector<json> events = WaitForEvents(servers.Metrics(shard), 1, wanted);
    REQUIRE(!events.empty());
    return events;
  }
};

TEST_CASE("ps_ctl set changes a running job on three servers at one version, which all of them write") {
  for (const std::string mode : {"bsp", "asp"}) {
    CAPTURE(mode);
    const Job job(mode);
    const uint64_t version = job.Set("learning_rate=0.01 momentum=0.5");
    for (uint32_t shard = 0; shard < Job::kShards; ++shard) {
      const json set = job.FirstSet(shard);
      CHECK(set["version"] == version);
      CHECK(set["values"].dump() == R"({"learning_rate":0.01,"momentum":0.5})");
      CHECK(job.servers[shard].WaitFor(".err", "momentum=0.5 from version " + std::to_string(version) + " on"));
    }
    CHECK(job.Status().find("now: learning_rate=0.01 momentum=0.5 weight_decay=0") != std::string::npos);
  }
}

TEST_CASE("ps_ctl set replaces the schedule on three servers at one version, and status shows it with its position") {
  for (const std::string mode : {"bsp", "asp"}) {
    CAPTURE(mode);
    const Job job(mode);
    std::string output;
    CHECK(job.Ctl({"set", "schedule=cosine"}, &output) == 1);
    CHECK(output.find("--schedule_length: --schedule=cosine needs it") != std::string::npos);
    CHECK(job.Status().find("\nschedule=constant; an epoch has 400 samples\n") != std::string::npos);
    // The job passed so much long ago.
    const uint64_t version = job.Set("learning_rate=0.5 schedule=linear schedule_end=0.125 schedule_length=1sample");
    for (uint32_t shard = 0; shard < Job::kShards; ++shard) {
      const json set = job.FirstSet(shard);
      CHECK(set["version"] == version);
      CHECK(set["schedule"] == "schedule=linear schedule_length=1samples schedule_end=0.125");
      const json made = job.AppliedFrom(shard, version);
      CHECK(made["learning_rate"] == 0.0625);
      CHECK(made["position"].get<uint64_t>() > 1);
      CHECK(job.AppliedBefore(shard, version)["learning_rate"] == 0.1);
    }
    output = job.Status();
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
  CHECK(job.Status().find("now: learning_rate=0.1 momentum=0.9 weight_decay=0") != std::string::npos);
  // The next change is the first one that there is.
  CHECK(job.Ctl({"set", "learning_rate=0.05"}, &output) == 0);
  CHECK(job.FirstSet(0)["values"].dump() == R"({"learning_rate":0.05})");
}

// It is stopped anywhere, also in the middle of a push, which holds a cut up until the worker is lost.
TEST_CASE("ps_ctl set waits for live workers only: one that is stopped delays it until its lease ends at most") {
  const Job job("asp", /*lease=*/"2s");
  job.workers[1]->Signal(SIGSTOP);
  std::string output;
  CHECK(job.Ctl({"--timeout=1m", "set", "learning_rate=0.01"}, &output) == 0);
  INFO(output);
  CHECK(output.find("learning_rate=0.01 from version ") == 0);
  for (uint32_t shard = 0; shard < Job::kShards; ++shard) CHECK(job.FirstSet(shard)["event"] == "set");
}

TEST_CASE("ps_ctl set on a job that does not run yet says so") {
  const TempFolder folder;
  Process server("ps_server", {"--num_workers=1"}, folder.File("server"));
  CheckRefused("ps_ctl", {"--server=" + server.Address(), "set", "learning_rate=0.5"}, "it is not running yet");
}

}  // namespace
}  // namespace ps
