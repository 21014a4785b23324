#include "tests/bench/exchange_bench.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "ps/client.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/bench_servers.h"
#include "tests/bench/meeting_point.h"
#include "tests/bench/mpi_baseline.h"
#include "tests/bench/raw_stream.h"

namespace ps {
namespace {

constexpr float kLearningRate = 1.0F / 1024;
constexpr size_t kPeriod = 7;  // Of the values of a model's elements, in layout order. No divisor of any alignment.

// Neighbours differ, and so do ranks: a value in another's place is noticed. It is a power of two, so that every
// product with it is exact, and the expected weights are so to the last bit.
float GradientAt(uint32_t rank, size_t element) {
  return std::ldexp(1.0F, -static_cast<int>((element + rank) % kPeriod));
}

float InitialAt(size_t element) { return 1 + GradientAt(0, element); }

// The plain formula in float32, in rank order.
float ExpectedAt(size_t element, uint32_t workers, uint64_t steps) {
  const auto coefficient = static_cast<float>(1.0 / static_cast<double>(workers));
  float mean = 0;
  for (uint32_t rank = 0; rank < workers; ++rank) mean += coefficient * GradientAt(rank, element);
  float weight = InitialAt(element);
  for (uint64_t step = 0; step < steps; ++step) weight -= kLearningRate * mean;
  return weight;
}

absl::Status CheckExchanged(const ConstTensors& weights, uint32_t workers, uint64_t steps) {
  std::array<float, kPeriod> expected;
  for (size_t i = 0; i < kPeriod; ++i) expected[i] = ExpectedAt(i, workers, steps);
  size_t element = 0;  // Of the model.
  for (size_t tensor = 0; tensor < weights.size(); ++tensor) {
    for (size_t i = 0; i < weights[tensor].size(); ++i, ++element) {
      const float weight = weights[tensor][i];
      if (weight == expected[element % kPeriod]) continue;
      return absl::InternalError(absl::StrCat("weight ", i, " of tensor ", tensor, " is ", weight, " after ", steps,
                                              " steps, expected ", expected[element % kPeriod]));
    }
  }
  return absl::OkStatus();
}

template <typename ValueAt>
void Fill(const MutableTensors& tensors, ValueAt value_at) {
  size_t element = 0;
  for (const std::span<float> tensor : tensors) {
    for (float& value : tensor) value = value_at(element++);
  }
}

class Bench {
 public:
  explicit Bench(const ExchangeBenchOptions& options) : options_(options) {}

  absl::StatusOr<Measurement> Run();

 private:
  absl::Status RunWorker(uint32_t rank, MeetingPoint& together);
  absl::Status RunSteps(Client& client, MeetingPoint& together);
  std::string Name() const;

  const ExchangeBenchOptions options_;
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::vector<double>> seconds_;  // Of each rank's repeats, which all ranks begin together.
};

// Sends the initial values, from memory that is not needed later.
absl::Status StartJob(Client& client, const Layout& layout, const MutableTensors& weights) {
  std::vector<float> values(static_cast<size_t>(ModelBytes(layout)) / sizeof(float));
  MutableTensors initial;
  initial.reserve(layout.size());
  size_t next = 0;
  for (const TensorSpec& tensor : layout) {
    const auto elements = static_cast<size_t>(tensor.elements());
    initial.push_back(std::span(values).subspan(next, elements));
    next += elements;
  }
  Fill(initial, InitialAt);
  return client.Start({initial.begin(), initial.end()}, weights).status();
}

absl::Status Bench::RunSteps(Client& client, MeetingPoint& together) {
  const absl::StatusOr<TensorMemory> gradients = client.GradientBuffers();
  if (!gradients.ok()) return gradients.status();
  const absl::StatusOr<TensorMemory> weights = client.WeightBuffers();
  if (!weights.ok()) return weights.status();
  Fill(gradients->tensors, [&](size_t element) { return GradientAt(client.rank(), element); });
  const ConstTensors out = gradients->Read();
  const MutableTensors& in = weights->tensors;
  PS_RETURN_IF_ERROR(StartJob(client, options_.layout, in));
  absl::StatusOr<ExchangeResult> result;
  uint64_t step = 0;
  for (int i = 0; i < options_.repeats + kWarmUp; ++i) {
    together.Meet();
    const TimePoint began = Now();
    if (options_.op == "pull") {
      result = client.Pull(in);
    } else {
      const PushInfo push = {.step = step, .version = step, .samples = 1};
      result = options_.op == "push" ? client.Push(push, out) : client.StartPushView(push, out, in, false)->Wait();
      ++step;
    }
    const double took = Seconds(Now() - began);
    together.Meet();  // Nobody's check keeps another's exchange waiting.
    if (!result.ok()) return result.status();
    if (i >= kWarmUp) seconds_[client.rank()].push_back(took);
    // Between the timed parts: every weight that came, in every repeat.
    if (options_.op == "push") continue;
    const bool viewed = !result->view.tensors.empty();
    PS_RETURN_IF_ERROR(CheckExchanged(viewed ? result->view.tensors : weights->Read(), options_.workers, step));
  }
  PS_RETURN_IF_ERROR(client.Done());
  result = client.Pull(in);
  if (!result.ok()) return result.status();
  return CheckExchanged(weights->Read(), options_.workers, step);
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
                      " servers", tensors > 1 ? absl::StrCat(", ", tensors, " tensors") : "");
}

absl::StatusOr<Measurement> Bench::Run() {
  ServerOptions server_options;
  server_options.num_workers = options_.workers;
  server_options.num_shards = options_.servers;
  server_options.hyperparameters = {.learning_rate = kLearningRate, .momentum = 0, .weight_decay = 0};
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
  std::vector<double> slowest(seconds_[0]);
  for (const std::vector<double>& rank : seconds_) {
    for (size_t i = 0; i < slowest.size(); ++i) slowest[i] = std::max(slowest[i], rank[i]);
  }
  const double ways = options_.op == "push_pull" ? 2 : 1;
  return Summarize(Name(), slowest, ways * options_.workers * static_cast<double>(ModelBytes(options_.layout)));
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
    sgd->Apply(block, {.hyperparameters = {.learning_rate = kLearningRate, .momentum = 0, .weight_decay = 0}},
               BestIsa());
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
