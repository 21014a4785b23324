#include "tests/bench/train_bench.h"

#include <algorithm>
#include <barrier>
#include <cstring>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/status.h"
#include "tests/bench/bench_layout.h"
#include "tests/bench/bench_network.h"
#include "tests/bench/bench_servers.h"
#include "tests/bench/measurement.h"
#include "tests/bench/mpi_baseline.h"
#include "worker/model/options.h"
#include "worker/train/trainer.h"

namespace ps {
namespace {

constexpr int kCopies = 20;
constexpr int64_t kWarmUpSteps = 10;  // Libraries load their kernels, buffers are touched for the first time.

// Runs work(i) on a thread each; the first error of any.
template <typename Work>
absl::Status OnThreads(uint32_t count, Work work) {
  std::vector<absl::Status> statuses(count);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < count; ++i) threads.emplace_back([&, i] { statuses[i] = work(i); });
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) PS_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

// Steps of one network on one thread, with nobody to wait for. Returns its seconds for `steps` steps.
absl::StatusOr<double> ComputeAlone(const TrainBenchOptions& options, uint32_t rank, std::barrier<>& together) {
  const auto bench = BenchNetwork::Create(options.widths, options.batch_size, options.device, rank);
  if (!bench.ok()) return bench.status();
  for (int64_t step = 0; step < kWarmUpSteps; ++step) PS_RETURN_IF_ERROR((*bench)->Compute());
  PS_RETURN_IF_ERROR((*bench)->backend().Synchronize());
  together.arrive_and_wait();
  const TimePoint began = Now();
  for (int64_t step = 0; step < options.steps; ++step) PS_RETURN_IF_ERROR((*bench)->Compute());
  PS_RETURN_IF_ERROR((*bench)->backend().Synchronize());
  return Seconds(Now() - began);
}

absl::StatusOr<double> RateAlone(const TrainBenchOptions& options, uint32_t workers) {
  std::barrier<> together(workers);
  std::vector<double> seconds(workers);
  PS_RETURN_IF_ERROR(OnThreads(workers, [&](uint32_t i) {
    const absl::StatusOr<double> alone = ComputeAlone(options, i, together);
    if (!alone.ok()) together.arrive_and_drop();
    if (alone.ok()) seconds[i] = *alone;
    return alone.status();
  }));
  double rate = 0;
  for (double each : seconds) rate += static_cast<double>(options.steps * options.batch_size) / each;
  return rate;
}

absl::StatusOr<TrainRow> TrainWith(const TrainBenchOptions& options, uint32_t workers) {
  ServerOptions server_options;
  server_options.num_workers = workers;
  server_options.num_shards = options.servers;
  server_options.mode.name = options.mode;
  server_options.mode.local_steps = options.local_steps;
  server_options.optimizer = "momentum";
  server_options.hyperparameters = {.learning_rate = 0.001F, .momentum = 0.9F, .weight_decay = 0};
  options.wire.Set(server_options);
  absl::StatusOr<std::vector<std::unique_ptr<Server>>> servers = StartBenchServers(server_options, options.transport);
  if (!servers.ok()) return servers.status();
  WorkerOptions worker;
  worker.client.server = servers->front()->address();
  worker.client.shared_memory = WorkersSharedMemory(options.transport);
  worker.model.widths = options.widths;
  worker.batch_size = options.batch_size;
  worker.steps = kWarmUpSteps + options.steps;
  worker.warm_up_steps = kWarmUpSteps;
  worker.device = options.device;
  // Whole steps only: no rank is left without samples at the end of an epoch.
  worker.data.dataset = absl::StrCat("synthetic:samples=", 20 * workers * options.batch_size,
                                     ",test=", std::max<int64_t>(100, options.widths.back()),
                                     ",features=", options.widths.front(), ",classes=", options.widths.back());
  TrainRow row = {.workers = workers};
  std::vector<TrainingResult> results(workers);
  PS_RETURN_IF_ERROR(OnThreads(workers, [&](uint32_t rank) -> absl::Status {
    absl::StatusOr<TrainingResult> result = Trainer(worker).Run({});
    if (!result.ok()) return result.status();
    results[rank] = *std::move(result);
    return absl::OkStatus();
  }));
  for (const auto& server : *servers) PS_RETURN_IF_ERROR(server->Wait());
  double seconds = 0;
  for (const TrainingResult& result : results) {
    const StepTotals& steps = result.steps;
    row.samples_per_s += static_cast<double>(steps.samples) / steps.train_s;
    seconds += steps.train_s;
    row.forward += steps.forward_s;
    row.backward += steps.backward_s;
    row.push += steps.push_s;
    row.wait += steps.wait_s;
    row.pull += steps.pull_s;
  }
  for (double* share : {&row.forward, &row.backward, &row.push, &row.wait, &row.pull}) *share /= seconds;
  return row;
}

// Bytes/s, read and written, of a copy of one replica of the model by each of the threads.
double CopyRate(size_t bytes, uint32_t threads) {
  std::barrier<> together(threads);
  std::vector<double> rates(threads);
  (void)OnThreads(threads, [&](uint32_t i) {
    const std::vector<uint8_t> from(bytes, 1);
    std::vector<uint8_t> to(bytes);
    together.arrive_and_wait();
    const Measurement copy =
        Measure("", kCopies, 2 * static_cast<double>(bytes), [&] { std::memcpy(to.data(), from.data(), bytes); });
    rates[i] = copy.bytes / copy.p50_s;
    return absl::OkStatus();
  });
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

// Of the workers' steps, each with a batch of each of them.
double Bound(const TrainBenchOptions& options, const TrainRow& row) {
  if (options.mode != "bsp" && options.mode != "asp") return 0;
  const auto bytes = static_cast<double>(ModelBytes(ModelLayout({.widths = options.widths})));
  const double versions = options.mode == "bsp" ? 1 : row.workers;
  const double moved = (row.workers + 4 * versions) * bytes;
  const auto samples = static_cast<double>(row.workers * options.batch_size);
  const double seconds = samples / row.alone_samples_per_s + moved / CopyRate(static_cast<size_t>(bytes), row.workers);
  return samples / seconds;
}

// Leaves samples/s as they are where there is no MPI.
absl::Status TrainWithMpi(const TrainBenchOptions& options, bool tcp, uint32_t ranks, double* samples_per_s) {
  const auto rate = MeasureMpiTraining(tcp, options.widths, options.batch_size, ranks, options.steps);
  if (rate.ok()) *samples_per_s = *rate;
  return absl::IsNotFound(rate.status()) ? absl::OkStatus() : rate.status();
}

}  // namespace

absl::StatusOr<std::vector<TrainRow>> RunTrainBench(const TrainBenchOptions& options) {
  std::vector<TrainRow> rows;
  for (uint32_t workers = 1; workers <= options.workers; ++workers) {
    absl::StatusOr<TrainRow> row = TrainWith(options, workers);
    if (!row.ok()) return row.status();
    const absl::StatusOr<double> alone = RateAlone(options, workers);
    if (!alone.ok()) return alone.status();
    row->alone_samples_per_s = *alone;
    row->bound_samples_per_s = Bound(options, *row);
    if (options.device.device == "cpu") {
      PS_RETURN_IF_ERROR(TrainWithMpi(options, /*tcp=*/false, workers, &row->mpi_memory_samples_per_s));
      PS_RETURN_IF_ERROR(TrainWithMpi(options, /*tcp=*/true, workers, &row->mpi_tcp_samples_per_s));
    }
    rows.push_back(*row);
    rows.back().efficiency = row->samples_per_s / (workers * rows.front().samples_per_s);
  }
  return rows;
}

}  // namespace ps
