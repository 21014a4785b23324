#include "tests/bench/exchange_bench.h"

#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "ps/client.h"
#include "server/server.h"
#include "tests/bench/mpi_baseline.h"
#include "tests/bench/raw_stream.h"

namespace ps {
namespace {

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
  // All ranks begin a repeat together; it takes until the last of them has ended.
  struct Begin {
    TimePoint* at;
    void operator()() const noexcept { *at = Now(); }
  };
  using Barrier = std::barrier<Begin>;
  absl::Status RunWorker(uint32_t rank, Barrier& together);
  absl::Status RunSteps(Client& client, Barrier& together);
  absl::Status Check(const std::vector<float>& weights, uint64_t steps) const;

  const ExchangeBenchOptions options_;
  const size_t elements_;
  std::vector<std::unique_ptr<Server>> servers_;
  TimePoint began_;                           // The repeat.
  std::vector<std::vector<double>> seconds_;  // Of each rank's repeats.
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

// The plain formula in float32, in rank order.
float ExpectedWeight(uint32_t workers, uint64_t steps) {
  const auto coefficient = static_cast<float>(1.0 / static_cast<double>(workers));
  float mean = 0;
  for (uint32_t rank = 0; rank < workers; ++rank) mean += coefficient * kGradient;
  float weight = kInitial;
  for (uint64_t step = 0; step < steps; ++step) weight -= kLearningRate * mean;
  return weight;
}

absl::Status Bench::Check(const std::vector<float>& weights, uint64_t steps) const {
  const float expected = ExpectedWeight(options_.workers, steps);
  const auto wrong = std::find_if(weights.begin(), weights.end(), [&](float weight) { return weight != expected; });
  if (wrong == weights.end()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("weight ", wrong - weights.begin(), " is ", *wrong, " after ", steps,
                                          " steps, expected ", expected));
}

absl::Status Bench::RunSteps(Client& client, Barrier& together) {
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
    if (options_.op == "pull") {
      result = client.Pull(in);
    } else {
      const PushInfo push = {.step = step, .version = step, .samples = 1};
      result = options_.op == "push" ? client.Push(push, out) : client.PushPull(push, out, in);
      ++step;
    }
    const double took = Seconds(Now() - began_);
    if (!result.ok()) return result.status();
    if (i >= kWarmUp) seconds_[client.rank()].push_back(took);
    // Between the timed parts: every weight that came, in every repeat.
    if (options_.op != "push") PS_RETURN_IF_ERROR(Check(weights, step));
  }
  PS_RETURN_IF_ERROR(client.Done());
  result = client.Pull(in);
  if (!result.ok()) return result.status();
  return Check(weights, step);
}

absl::Status Bench::RunWorker(uint32_t rank, Barrier& together) {
  absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Join({.server = servers_[0]->address(), .rank = rank}, {{"w", {static_cast<int64_t>(elements_)}}});
  if (!client.ok()) return client.status();
  const absl::Status status = RunSteps(**client, together);
  const absl::Status left = (*client)->Leave(status.ok() ? "" : Message(status));
  return status.ok() ? left : status;
}

absl::StatusOr<Measurement> Bench::Run() {
  PS_RETURN_IF_ERROR(StartServers());
  Barrier together(options_.workers, Begin{&began_});
  seconds_.resize(options_.workers);
  std::vector<absl::Status> statuses(options_.workers);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < options_.workers; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = RunWorker(rank, together);
      together.arrive_and_drop();  // Whoever fails holds up nobody.
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A job that never ran does not end; its servers do with this.
  for (const absl::Status& status : statuses) PS_RETURN_IF_ERROR(status);
  for (const auto& server : servers_) PS_RETURN_IF_ERROR(server->Wait());
  std::vector<double> slowest(seconds_[0]);
  for (const std::vector<double>& rank : seconds_) {
    for (size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
  }
  const double ways = options_.op == "push_pull" ? 2 : 1;
  return Summarize(absl::StrCat(options_.op, ", ", options_.transport, ", ", options_.workers, " workers, ",
                                options_.servers, " servers"),
                   slowest, ways * options_.workers * static_cast<double>(options_.bytes));
}

}  // namespace

absl::StatusOr<std::vector<Measurement>> RunExchangeBench(const ExchangeBenchOptions& options) {
  const auto bytes = static_cast<size_t>(options.bytes);
  const double moved = static_cast<double>(options.bytes);
  std::vector<Measurement> rows;
  const absl::StatusOr<std::vector<double>> raw = MeasureRawStream(options.transport == "tcp", bytes, options.repeats);
  if (!raw.ok()) return raw.status();
  rows.push_back(Summarize(absl::StrCat("raw ", options.transport, " stream, one way"), *raw, moved));

  std::vector<float> from(bytes / sizeof(float), 1);
  std::vector<float> to(bytes / sizeof(float));
  rows.push_back(Measure("memcpy", options.repeats, moved, [&] { std::memcpy(to.data(), from.data(), bytes); }));
  const std::unique_ptr<Optimizer> sgd = *MakeOptimizer("sgd");
  const OptimizerBlock block = {
      .elements = from.size(), .gradient = from.data(), .weights = to.data(), .new_weights = to.data()};
  rows.push_back(Measure("SGD in place, one thread", options.repeats, moved, [&] {
    sgd->Apply(block, {.hyperparameters = {.learning_rate = kLearningRate, .momentum = 0, .weight_decay = 0}},
               BestIsa());
  }));
  for (const bool tcp : {false, true}) {
    if (options.op != "push_pull" || options.workers < 2) continue;
    const auto mpi = MeasureMpiAllreduce(tcp, options.bytes, options.workers, options.repeats);
    if (absl::IsNotFound(mpi.status())) continue;
    if (!mpi.ok()) return mpi.status();
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
