#include "tests/bench/exchange_bench.h"

#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"
#include "ps/client.h"
#include "server/optimizers/optimizer.h"
#include "server/server.h"
#include "tests/bench/mpi_baseline.h"
#include "tests/bench/raw_stream.h"

namespace ps {
namespace {

// Powers of two, so that every weight is exact: w = 1 − rate · gradient · steps.
constexpr float kLearningRate = 1.0F / 1024;
constexpr float kGradient = 0.5F;
constexpr float kInitial = 1.0F;

class Bench {
 public:
  explicit Bench(const ExchangeBenchOptions& options)
      : options_(options), elements_(static_cast<size_t>(options.bytes) / sizeof(float)) {}

  absl::StatusOr<Measurement> Run();

 private:
  absl::Status StartServers();
  absl::Status RunWorker(uint32_t rank, std::barrier<>& together);
  absl::Status RunSteps(Client& client, std::barrier<>& together);
  absl::Status Check(const std::vector<float>& weights, uint64_t steps) const;

  const ExchangeBenchOptions options_;
  const size_t elements_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<double> seconds_;  // Of rank 0's repeats.
};

absl::Status Bench::StartServers() {
  ServerOptions options;
  options.num_workers = options_.workers;
  options.num_shards = options_.servers;
  options.hyperparameters = {.learning_rate = kLearningRate, .momentum = 0, .weight_decay = 0};
  for (uint32_t shard = 0; shard < options_.servers; ++shard) {
    options.shard = shard;
    if (options_.transport == "unix") options.listen = absl::StrCat("unix:/tmp/ps_bench.", getpid(), ".", shard);
    if (shard > 0) options.chief = servers_[0]->address();
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
    if (!server.ok()) return server.status();
    servers_.push_back(*std::move(server));
  }
  return absl::OkStatus();
}

absl::Status Bench::Check(const std::vector<float>& weights, uint64_t steps) const {
  const float expected = kInitial - kLearningRate * kGradient * static_cast<float>(steps);
  const auto wrong = std::find_if(weights.begin(), weights.end(), [&](float weight) { return weight != expected; });
  if (wrong == weights.end()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("weight ", wrong - weights.begin(), " is ", *wrong, " after ", steps,
                                          " steps, expected ", expected));
}

absl::Status Bench::RunSteps(Client& client, std::barrier<>& together) {
  const std::vector<float> initial(elements_, kInitial);
  const std::vector<float> gradient(elements_, kGradient);
  std::vector<float> weights(elements_);
  const ConstTensors out = {gradient};
  const MutableTensors in = {weights};
  absl::StatusOr<ExchangeResult> result = client.Start({initial}, in);
  if (!result.ok()) return result.status();
  uint64_t step = 0;
  for (int i = 0; i < options_.repeats + kWarmUp; ++i) {
    together.arrive_and_wait();
    const TimePoint began = Now();
    if (options_.op == "pull") {
      result = client.Pull(in);
    } else {
      const PushInfo push = {.step = step, .version = step, .samples = 1};
      result = options_.op == "push" ? client.Push(push, out) : client.PushPull(push, out, in);
      ++step;
    }
    const double took = Seconds(Now() - began);
    if (!result.ok()) return result.status();
    if (client.rank() == 0 && i >= kWarmUp) seconds_.push_back(took);
    // Between the timed parts: every weight that came, in every repeat.
    if (options_.op != "push") PS_RETURN_IF_ERROR(Check(weights, step));
  }
  PS_RETURN_IF_ERROR(client.Done());
  result = client.Pull(in);
  if (!result.ok()) return result.status();
  return Check(weights, step);
}

absl::Status Bench::RunWorker(uint32_t rank, std::barrier<>& together) {
  absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Join({.server = servers_[0]->address(), .rank = rank}, {{"w", {static_cast<int64_t>(elements_)}}});
  if (!client.ok()) return client.status();
  const absl::Status status = RunSteps(**client, together);
  const absl::Status left = (*client)->Leave(status.ok() ? "" : Message(status));
  return status.ok() ? left : status;
}

absl::StatusOr<Measurement> Bench::Run() {
  PS_RETURN_IF_ERROR(StartServers());
  std::barrier<> together(options_.workers);
  std::vector<absl::Status> statuses(options_.workers);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < options_.workers; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = RunWorker(rank, together);
      together.arrive_and_drop();  // Whoever fails holds up nobody.
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& server : servers_) PS_RETURN_IF_ERROR(server->Wait());
  for (const absl::Status& status : statuses) PS_RETURN_IF_ERROR(status);
  const double ways = options_.op == "push_pull" ? 2 : 1;
  return Summarize(absl::StrCat(options_.op, ", ", options_.transport, ", ", options_.workers, " workers, ",
                                options_.servers, " servers"),
                   seconds_, ways * options_.workers * static_cast<double>(options_.bytes));
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunExchangeBench(const ExchangeBenchOptions& options) {
  const auto bytes = static_cast<size_t>(options.bytes);
  const double moved = static_cast<double>(options.bytes);
  std::vector<Measurement> rows;
  const absl::StatusOr<std::vector<double>> raw =
      MeasureRawStream(options.transport == "tcp", bytes, options.repeats + kWarmUp);
  if (!raw.ok()) return raw.status();
  rows.push_back(Summarize(absl::StrCat("raw ", options.transport, " stream, one way"), *raw, moved));

  std::vector<float> from(bytes / sizeof(float), 1);
  std::vector<float> to(bytes / sizeof(float));
  rows.push_back(Measure("memcpy", options.repeats, moved, [&] { std::memcpy(to.data(), from.data(), bytes); }));
  const std::unique_ptr<Optimizer> sgd = *MakeOptimizer("sgd");
  const OptimizerBlock block = {
      .elements = from.size(), .gradient = from.data(), .weights = to.data(), .new_weights = to.data()};
  rows.push_back(Measure("SGD in place, one thread", options.repeats, moved, [&] {
    sgd->Apply(block, {.learning_rate = kLearningRate, .momentum = 0, .weight_decay = 0}, BestIsa());
  }));
  for (const bool tcp : {false, true}) {
    if (options.op != "push_pull" || options.workers < 2) continue;
    const auto mpi = MeasureMpiAllreduce(tcp, options.bytes, options.workers, options.repeats);
    if (!mpi.ok()) continue;
    rows.push_back(
        Summarize(absl::StrCat("MPI_Allreduce, ", tcp ? "tcp, " : "shared memory, ", options.workers, " ranks"), *mpi,
                  2 * moved * options.workers));
  }
  absl::StatusOr<Measurement> exchange = Bench(options).Run();
  if (!exchange.ok()) return exchange.status();
  rows.push_back(*std::move(exchange));
  for (Measurement& row : rows) row.ratio = (row.bytes / row.p50_s) / (rows[0].bytes / rows[0].p50_s);
  return rows;
}

}  // namespace ps
