#include "tests/bench/exchange_bench.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "ps/client.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/bench_servers.h"
#include "tests/bench/known_job.h"
#include "tests/bench/meeting_point.h"
#include "tests/bench/mpi_baseline.h"
#include "tests/bench/raw_stream.h"

namespace ps {
namespace {

class Bench {
 public:
  explicit Bench(const ExchangeBenchOptions& options) : options_(options) {}

  absl::StatusOr<Measurement> Run();

 private:
  absl::Status RunWorker(uint32_t rank, MeetingPoint& together);
  absl::Status RunSteps(Client& client, MeetingPoint& together);
  std::string Name() const;
  std::vector<double> Repeats() const;

  const ExchangeBenchOptions options_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::vector<double>> seconds_;  // The time of each rank's repeats, which all ranks begin together.
};

absl::Status Bench::RunSteps(Client& client, MeetingPoint& together) {
  const absl::StatusOr<TensorMemory> gradients = client.GradientBuffers();
  if (!gradients.ok()) return gradients.status();
  const absl::StatusOr<TensorMemory> weights = client.WeightBuffers();
  if (!weights.ok()) return weights.status();
  FillKnownGradients(client.rank(), gradients->tensors);
  const ConstTensors out = gradients->Read();
  const MutableTensors& in = weights->tensors;
  PS_RETURN_IF_ERROR(StartKnownJob(client, options_.layout, in));
  const bool together_each = options_.mode == "bsp";
  KnownWeights known(options_.layout, options_.workers, options_.wire.Format(), together_each ? options_.workers : 1);
  absl::StatusOr<ExchangeResult> result;
  uint64_t step = 0;
  uint64_t version = 0;
  if (!together_each) together.Meet();
  for (int i = 0; i < options_.repeats + kWarmUp; ++i) {
    if (together_each) together.Meet();
    const TimePoint began = Now();
    if (options_.op == "pull") {
      result = client.Pull(in);
    } else {
      const PushInfo push = {.step = step, .version = version, .samples = 1};
      result = options_.op == "push" ? client.Push(push, out) : client.StartPushView(push, out, in, false)->Wait();
      ++step;
    }
    const double took = Seconds(Now() - began);
    if (together_each) together.Meet();  // Nobody's check keeps another's exchange waiting.
    if (!result.ok()) return result.status();
    version = result->version;
    if (i >= kWarmUp) seconds_[client.rank()].push_back(took);
    // Between the timed parts: every weight that came, in every repeat.
    if (options_.op == "push" || !together_each) continue;
    const bool viewed = !result->view.tensors.empty();
    PS_RETURN_IF_ERROR(known.Check(viewed ? result->view.tensors : weights->Read(), step));
  }
  if (!together_each) together.Meet();  // All that is pushed is in what is pulled.
  PS_RETURN_IF_ERROR(client.Done());
  result = client.Pull(in);
  if (!result.ok()) return result.status();
  return known.Check(weights->Read(), step);
}

absl::Status Bench::RunWorker(uint32_t rank, MeetingPoint& together) {
  const ClientOptions options = {
      .server = servers_[0]->address(), .shared_memory = WorkersSharedMemory(options_.transport), .rank = rank};
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Join(options, options_.layout);
  if (!client.ok()) return client.status();
  const absl::Status status = RunSteps(**client, together);
  const absl::Status left = (*client)->Leave(status.ok() ? "" : Message(status));
  return status.ok() ? left : status;
}

std::string Bench::Name() const {
  const size_t tensors = options_.layout.size();
  return absl::StrCat(options_.op, ", ", options_.transport, ", ", options_.workers, " workers, ", options_.servers,
                      " servers", options_.mode == "bsp" ? "" : absl::StrCat(", ", options_.mode),
                      tensors > 1 ? absl::StrCat(", ", tensors, " tensors") : "", options_.wire.Text());
}

std::vector<double> Bench::Repeats() const {
  std::vector<double> repeats;
  if (options_.mode == "asp") {
    for (const std::vector<double>& rank : seconds_) repeats.insert(repeats.end(), rank.begin(), rank.end());
    return repeats;
  }
  repeats = seconds_[0];
  for (const std::vector<double>& rank : seconds_) {
    for (size_t i = 0; i < repeats.size(); ++i) repeats[i] = std::max(repeats[i], rank[i]);
  }
  return repeats;
}

absl::StatusOr<Measurement> Bench::Run() {
  ServerOptions server_options;
  server_options.num_workers = options_.workers;
  server_options.num_shards = options_.servers;
  server_options.mode.name = options_.mode;
  options_.wire.Set(server_options);
  server_options.hyperparameters = {.learning_rate = kKnownRate, .momentum = 0, .weight_decay = 0};
  absl::StatusOr<std::vector<std::unique_ptr<Server>>> servers = StartBenchServers(server_options, options_.transport);
  if (!servers.ok()) return servers.status();
  servers_ = *std::move(servers);
  MeetingPoint together(options_.workers);
  seconds_.resize(options_.workers);
  std::vector<absl::Status> statuses(options_.workers);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < options_.workers; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = RunWorker(rank, together);
      together.Leave();  // Whoever fails holds up nobody.
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A job that never ran does not end; its servers do with this.
  for (const absl::Status& status : statuses) PS_RETURN_IF_ERROR(status);
  for (const auto& server : servers_) PS_RETURN_IF_ERROR(server->Wait());
  const double ways = options_.op == "push_pull" ? 2 : 1;
  return Summarize(Name(), Repeats(), ways * options_.workers * static_cast<double>(ModelBytes(options_.layout)));
}

// One thread's copy and update of the model, in memory.
void AddInMemory(size_t bytes, int repeats, std::vector<Measurement>& rows) {
  const auto moved = static_cast<double>(bytes);
  const std::vector<float> from(bytes / sizeof(float), 1);
  std::vector<float> to(from.size());
  rows.push_back(Measure("memcpy", repeats, moved, [&] { std::memcpy(to.data(), from.data(), bytes); }));
  const std::unique_ptr<Optimizer> sgd = *MakeOptimizer("sgd");
  const OptimizerBlock block = {
      .elements = from.size(), .gradient = from.data(), .weights = to.data(), .new_weights = to.data()};
  rows.push_back(Measure("SGD in place, one thread", repeats, moved, [&] {
    sgd->Apply(block, {.hyperparameters = {.learning_rate = kKnownRate, .momentum = 0, .weight_decay = 0}}, BestIsa());
  }));
}

// What several workers could do without a server; nothing where there is no MPI.
absl::Status AddMpi(int64_t bytes, uint32_t ranks, int repeats, std::vector<Measurement>& rows) {
  for (const bool tcp : {false, true}) {
    for (const bool sgd : {false, true}) {
      const auto seconds = MeasureMpiAllreduce(tcp, bytes, ranks, repeats, sgd);
      if (absl::IsNotFound(seconds.status())) return absl::OkStatus();
      if (!seconds.ok()) return seconds.status();
      rows.push_back(Summarize(
          absl::StrCat("MPI_Allreduce", sgd ? " + SGD, " : ", ", tcp ? "tcp, " : "shared memory, ", ranks, " ranks"),
          *seconds, 2.0 * ranks * static_cast<double>(bytes)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunExchangeBench(const ExchangeBenchOptions& options) {
  const int64_t bytes = ModelBytes(options.layout);
  std::vector<Measurement> rows;
  if (options.transport != "shm") {
    const absl::StatusOr<std::vector<double>> raw =
        MeasureRawStream(options.transport == "tcp", static_cast<size_t>(bytes), options.repeats);
    if (!raw.ok()) return raw.status();
    rows.push_back(
        Summarize(absl::StrCat("raw ", options.transport, " stream, one way"), *raw, static_cast<double>(bytes)));
  }
  AddInMemory(static_cast<size_t>(bytes), options.repeats, rows);
  if (options.op == "push_pull" && options.workers > 1) {
    PS_RETURN_IF_ERROR(AddMpi(bytes, options.workers, options.repeats, rows));
  }
  absl::StatusOr<Measurement> exchange = Bench(options).Run();
  if (!exchange.ok()) return exchange.status();
  rows.push_back(*std::move(exchange));
  for (Measurement& row : rows) row.ratio = (row.bytes / row.p50_s) / (rows[0].bytes / rows[0].p50_s);
  return rows;
}

}  // namespace ps
