// A rank that changes hands in a running job.
#include "common/clock.h"
#include "ps/client.h"
#include "tests/integration/cluster.h"
#include "tests/integration/process.h"
#include "worker/link/tensor_memory.h"
#include "worker/train/preparation.h"

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

// A member of the job that pushes so many of its last fragments, each a difference of zeros, and is lost.
void PushSome(const WorkerOptions& options, uint64_t pushes) {
  const absl::StatusOr<Preparation> prepared = Prepare(options);
  REQUIRE(prepared.ok());
  ClientOptions joins = options.client;
  joins.experiment = Experiment(options, prepared->data, prepared->initial.values);
  joins.samples_per_epoch = static_cast<uint64_t>(prepared->data.train.size());
  joins.does_fragments = true;
  const auto client = Client::Join(joins, prepared->layout);
  REQUIRE(client.ok());
  const absl::StatusOr<TensorMemory> zeros = AllocateTensors(prepared->layout);
  const absl::StatusOr<TensorMemory> weights = AllocateTensors(prepared->layout);
  REQUIRE((zeros.ok() && weights.ok()));
  const auto initial = InitialValues(options.model, options.init, options.seed);
  REQUIRE((*client)->Start(ConstTensors(initial.begin(), initial.end()), weights->tensors).ok());
  const auto& fragments = (*client)->policy().local_steps->fragments;
  for (uint64_t step = 0; step < pushes; ++step) {
    const PushInfo push = {.step = step,
                           .version = step,
                           .samples = 80,
                           .contribution = PushContribution::kWeightDifference,
                           .tensors = fragments[step % fragments.size()]};
    REQUIRE((*client)->PushPull(push, zeros->Read(), weights->tensors).ok());
  }
  REQUIRE((*client)->Leave("it is lost").ok());
}

TEST_CASE("Whoever takes a lost worker's rank among a job's last pushes makes those that are left") {
  ServerOptions server;
  server.num_workers = 2;
  server.mode.name = "diloco";
  server.mode.on_worker_loss = "wait";
  server.mode.local_steps = 32;
  server.mode.fragments = 4;  // One after every 8 batches, which are all that there are: all four are last ones.
  Cluster cluster(server);
  WorkerOptions options = Options(cluster.address(), 0);
  options.epochs = 1;
  options.steps = 8;
  options.client.does_fragments = true;
  std::vector<absl::StatusOr<TrainingResult>> results(2, absl::UnknownError("did not run"));
  const auto train = [&](uint32_t rank) {
    WorkerOptions mine = options;
    mine.client.rank = rank;
    return std::thread([mine, &result = results[rank]] { result = Trainer(mine).Run({}); });
  };
  std::thread first = train(0);
  WorkerOptions lost = options;
  lost.client.rank = 1;
  PushSome(lost, 2);
  std::thread replacement = train(1);
  first.join();
  replacement.join();
  for (const auto& result : results) CHECK(result.status() == absl::OkStatus());
  CHECK(cluster.servers[0]->Wait().ok());
  CHECK(cluster.Events("server.jsonl", "apply").size() == 4);
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
