// --budget=job: every run of samples is used once, whoever is lost.
#include <map>

#include "tests/integration/process.h"

namespace ps {
namespace {

constexpr int64_t kRunsPerEpoch = 20;  // kSmallJob has 400 samples, in runs of 20.
// The worker idles over its first batch, so that it has pushed nothing of its run when it is killed.
constexpr const char* kHoldsItsRun = "--experiment_step_time=10m";

struct Division {
  int64_t runs = 0;              // The whole job's.
  std::map<int64_t, int> dealt;  // Times, by run.
  std::map<int64_t, int> returned;
  std::map<int64_t, int> of_worker;  // Runs that it took, by rank.
};

// What the chief's metrics file tells.
Division ReadDivision(const std::string& file) {
  Division division;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json event = nlohmann::json::parse(line);
    if (event["event"] == "runs") {
      division.runs = event["runs"];
      CHECK(event["runs_per_epoch"] == kRunsPerEpoch);
    }
    if (event["event"] != "run") continue;
    const int64_t run = event["run"];
    CHECK(event["epoch"] == run / kRunsPerEpoch);
    if (event["returned"] == true) {
      ++division.returned[run];
    } else {
      ++division.dealt[run];
      ++division.of_worker[event["worker"]];
    }
  }
  return division;
}

// Each run was dealt, and once more for each time that it came back.
void CheckEachRunOnce(Division division) {
  REQUIRE(division.runs > 0);
  CHECK(static_cast<int64_t>(division.dealt.size()) == division.runs);
  for (const auto& [run, times] : division.dealt) CHECK(times == 1 + division.returned[run]);
}

TEST_CASE("The runs of a worker that is killed are given out again, and every run is used once") {
  for (const int servers : {1, 2}) {
    const TempFolder folder;
    const std::string metrics = folder.File("chief.jsonl");
    const std::vector<std::string> job = {"--num_workers=2", "--mode=asp", "--budget=job", "--reconnect_grace=100ms",
                                          "--num_shards=" + std::to_string(servers)};
    std::vector<std::string> flags = job;
    flags.push_back("--metrics_file=" + metrics);
    Process chief("ps_server", flags, folder.File("chief"));
    const std::string address = chief.Address();
    std::optional<Process> shard;
    if (servers > 1) {
      flags = job;
      flags.insert(flags.end(), {"--shard=1", "--chief=" + address});
      shard.emplace("ps_server", flags, folder.File("shard"));
    }
    Process stays("ps_worker", Worker(address, {"--rank=0", "--epochs=20"}), folder.File("stays"));
    Process killed("ps_worker", Worker(address, {"--rank=1", "--epochs=20", kHoldsItsRun}), folder.File("killed"));
    REQUIRE(chief.WaitFor(".jsonl", R"("worker":1)"));
    killed.Signal(SIGKILL);
    CHECK(killed.Wait() == 128 + SIGKILL);
    CHECK(stays.Wait() == 0);
    CHECK(chief.Wait() == 0);
    if (shard.has_value()) CHECK(shard->Wait() == 0);
    const Division division = ReadDivision(metrics);
    CHECK(division.runs == 20 * kRunsPerEpoch);
    CHECK_FALSE(division.returned.empty());
    CheckEachRunOnce(division);
  }
}

TEST_CASE("A replacement goes on with the job's runs where all others are") {
  const TempFolder folder;
  const std::string metrics = folder.File("chief.jsonl");
  // The run that the killed worker holds comes back when its successor has joined, so that the job does not end before.
  Process chief("ps_server",
                {"--num_workers=2", "--mode=asp", "--budget=job", "--lease=60s", "--reconnect_grace=60s",
                 "--metrics_file=" + metrics},
                folder.File("chief"));
  const std::string address = chief.Address();
  Process stays("ps_worker", Worker(address, {"--rank=0", "--epochs=20"}), folder.File("stays"));
  REQUIRE(chief.WaitFor(".err", "joined (1 of 2)"));  // Before the other one, which takes the lowest free rank.
  Process killed("ps_worker", Worker(address, {"--name=b", "--epochs=20", kHoldsItsRun}), folder.File("killed"));
  REQUIRE(chief.WaitFor(".jsonl", R"("worker":1)"));
  killed.Signal(SIGKILL);
  Process replacement("ps_worker", Worker(address, {"--name=b", "--epochs=20"}), folder.File("replacement"));
  CHECK(replacement.Wait() == 0);
  CHECK(stays.Wait() == 0);
  CHECK(chief.Wait() == 0);
  const Division division = ReadDivision(metrics);
  CHECK_FALSE(division.returned.empty());
  CheckEachRunOnce(division);
}

TEST_CASE("In every mode the workers together use the job's samples once an epoch, also where the last step is short",
          "[unsanitized]") {
  for (const ModeOptions& mode :
       {ModeOptions{.name = "bsp"}, ModeOptions{.name = "asp"}, ModeOptions{.name = "ssp"},
        ModeOptions{.name = "backup"}, ModeOptions{.name = "local_sgd"},
        ModeOptions{.name = "diloco", .local_steps = 3},
        ModeOptions{.name = "diloco", .local_steps = 3, .outer_sync = "async"}, ModeOptions{.name = "easgd"}}) {
    for (const uint32_t servers : {1U, 2U}) {
      INFO(mode.name << " " << mode.outer_sync << " on " << servers);
      ServerOptions server;
      server.num_workers = 3;
      server.num_shards = servers;
      server.mode = mode;
      server.budget = "job";
      Cluster cluster(server);
      WorkerOptions options;
      options.model.widths = {20, 8, 4};
      options.data.dataset = "synthetic:samples=410,features=20,classes=4";
      options.batch_size = 20;
      options.epochs = 3;
      int64_t samples = 0;
      for (const auto& result : cluster.Train(options, 3)) {
        CHECK(result.status() == absl::OkStatus());
        if (result.ok()) samples += result->steps.samples;
      }
      CHECK(cluster.server_status == absl::OkStatus());
      // The samples of a step that is STALE are used, and counted as dropped.
      CHECK(samples == 3 * 410);
    }
  }
}

TEST_CASE("With --stale_runs=return each sample is applied once an epoch, however many pushes are refused") {
  for (const ModeOptions& mode : {ModeOptions{.name = "asp", .max_staleness = 0}, ModeOptions{.name = "backup"}}) {
    INFO(mode.name);
    ServerOptions server;
    server.num_workers = 3;
    server.mode = mode;
    server.budget = "job";
    server.stale_runs = "return";
    Cluster cluster(server);
    WorkerOptions options;
    options.model.widths = {20, 8, 4};
    options.data.dataset = "synthetic:samples=410,features=20,classes=4";
    options.batch_size = 20;
    options.epochs = 10;
    int64_t samples = 0;
    int64_t dropped = 0;
    for (const auto& result : cluster.Train(options, 3)) {
      REQUIRE(result.status() == absl::OkStatus());
      samples += result->steps.samples;
      dropped += result->steps.dropped_samples;
    }
    CHECK(cluster.server_status == absl::OkStatus());
    CHECK(dropped > 0);
    CHECK(samples - dropped == 10 * 410);
  }
}

}  // namespace
}  // namespace ps
