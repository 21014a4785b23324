// A rank that changes hands in a running job.
#include "common/clock.h"
#include "tests/integration/cluster.h"
#include "tests/integration/process.h"

namespace ps {
namespace {

constexpr int kStepsPerEpoch = 10;

WorkerOptions Options(const std::string& server, uint32_t rank) {
  WorkerOptions options;
  options.client.server = server;
  options.client.rank = rank;
  options.model.widths = {20, 8, 4};
  options.data.dataset = "synthetic:samples=400,features=20,classes=4";
  options.batch_size = 400 / 2 / kStepsPerEpoch;
  options.epochs = 1e6;
  options.eval_every = 1;
  return options;
}

// Trains on a thread, for as long as it lives.
class Running {
 public:
  explicit Running(const WorkerOptions& options) : trainer_(options), thread_([this] { (void)trainer_.Run({}); }) {}
  ~Running() {
    trainer_.Stop();
    thread_.join();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Trainer trainer_;
  std::thread thread_;
};

TEST_CASE(
    "A replacement worker appends to the metrics file and keeps the evaluation schedule, without making up missed "
    "ones") {
  ServerOptions server;
  server.num_workers = 2;
  server.mode.name = "asp";
  Cluster cluster(server);
  WorkerOptions options = Options(cluster.address(), 0);
  options.metrics_file = cluster.folder.File("worker.jsonl");
  const Running other(Options(cluster.address(), 1));
  {
    const Running first(options);
    REQUIRE(cluster.WaitForEvents("worker.jsonl", "step", 55).size() >= 55);
  }
  const size_t before = cluster.Events("worker.jsonl", "eval").size();
  {
    const Running second(options);
    REQUIRE(cluster.WaitForEvents("worker.jsonl", "eval", before + 2).size() >= before + 2);
  }
  CHECK(cluster.Events("worker.jsonl", "start").size() == 2);
  const auto evaluations = cluster.Events("worker.jsonl", "eval");
  for (const auto& evaluation : evaluations) CHECK(evaluation["step"].get<int>() % kStepsPerEpoch == 0);
  CHECK(evaluations[before]["step"] > evaluations[before - 1]["step"]);
}

TEST_CASE(
    "Where a mode goes on without a killed worker, a new one takes its rank on 3 servers, and all of them finish") {
  for (const std::vector<std::string>& mode :
       std::vector<std::vector<std::string>>{{"--mode=asp", "--delay_compensation=0.04"},
                                             {"--mode=ssp", "--staleness=2"},
                                             {"--mode=backup"},
                                             {"--mode=easgd"},
                                             {"--mode=asp", "--budget=job"}}) {
    CAPTURE(mode);
    const TempFolder folder;
    std::vector<std::unique_ptr<Process>> job;
    std::string chief;
    for (const std::string shard : {"0", "1", "2"}) {
      std::vector<std::string> arguments = {"--num_workers=3", "--num_shards=3",          "--optimizer=momentum",
                                            "--lease=60s",     "--reconnect_grace=100ms", "--shard=" + shard};
      arguments.insert(arguments.end(), mode.begin(), mode.end());
      if (!chief.empty()) arguments.push_back("--chief=" + chief);
      job.push_back(std::make_unique<Process>("ps_server", arguments, folder.File("server-" + shard)));
      if (chief.empty()) chief = job.back()->Address();
    }
    // Workers are slow, so that none has ended before one is killed.
    const auto start = [&](const std::string& rank, const std::string& log) {
      const std::string file = folder.File(log);
      return std::make_unique<Process>("ps_worker",
                                       Worker(chief, {"--rank=" + rank, "--epochs=60", "--experiment_step_time=5ms",
                                                      "--metrics_file=" + file + ".jsonl"}),
                                       file);
    };
    job.push_back(start("0", "worker-0"));
    job.push_back(start("2", "worker-2"));
    const auto signal_others = [&](int signal) {
      for (size_t i = 3; i < 5; ++i) job[i]->Signal(signal);
    };
    {
      const auto killed = start("1", "killed");
      // All take part: one that is stopped before its stream is open would be lost as well.
      for (size_t i = 3; i < 5; ++i) REQUIRE(job[i]->WaitFor(".jsonl", "\"event\":\"step\""));
      signal_others(SIGSTOP);  // They must not end before the rank is taken.
      killed->Signal(SIGKILL);
      CHECK(killed->Wait() == 128 + SIGKILL);
    }
    REQUIRE(job[0]->WaitFor(".err", "was lost"));
    job.push_back(start("1", "replacement"));
    CHECK(job[0]->WaitFor(".err", "incarnation 2"));
    signal_others(SIGCONT);
    for (const auto& process : job) {
      const int status = process->Wait();
      INFO(process->Errors());
      CHECK(status == 0);
    }
  }
}

}  // namespace
}  // namespace ps
