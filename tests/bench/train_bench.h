// ps_bench train: what training costs with servers, beside the same computation without any exchange.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/wire_options.h"
#include "worker/model/device.h"

namespace ps {

struct TrainBenchOptions {
  std::string transport = "tcp";  // Or unix, shm: bench_servers.h.
  std::vector<int64_t> widths;    // The network's.
  int64_t batch_size = 128;       // A worker's.
  uint32_t workers = 2;           // Measured with 1 up to so many.
  uint32_t servers = 1;
  std::string mode = "bsp";
  std::optional<uint32_t> local_steps;  // In modes that have them; unset: the mode's default.
  int64_t steps = 300;
  DeviceOptions device;
  WireOptions wire;
};

struct TrainRow {
  uint32_t workers = 0;
  double samples_per_s = 0;        // All workers together.
  double alone_samples_per_s = 0;  // The same networks on as many threads, on one batch, without any exchange.
  // What is left of that where a step also moves the bytes that its mode has to, at the rate of a copy of the model in
  // as many threads: which for a model that fits into caches is theirs: least passes over it with momentum, for each
  // version the weights and the velocity read and written, and each gradient read once. 0: only bsp and asp have such a
  // number. It is a bound where the processors are all busy: a server on a processor of its own moves them meanwhile.
  double bound_samples_per_s = 0;
  // The same in as many ranks that sum with MPI, through shared memory and over TCP; 0: there is no MPI.
  double mpi_memory_samples_per_s = 0;
  double mpi_tcp_samples_per_s = 0;
  double efficiency = 0;                                           // samples_per_s over workers × that of one worker.
  double forward = 0, backward = 0, push = 0, wait = 0, pull = 0;  // Shares of the workers' time.
};

// On synthetic data, on this machine; servers and workers on threads of this process.
absl::StatusOr<std::vector<TrainRow>> RunTrainBench(const TrainBenchOptions& options);

}  // namespace ps
