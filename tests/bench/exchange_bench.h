// ps_bench exchange: what a push, a pull or both cost through real servers, beside what the machine allows.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ps/tensor.h"
#include "tests/bench/measurement.h"
#include "tests/bench/wire_options.h"

namespace ps {

struct ExchangeBenchOptions {
  std::string transport = "tcp";  // Or unix, shm: bench_servers.h.
  Layout layout;                  // The model.
  uint32_t workers = 1;
  uint32_t servers = 1;
  std::string op = "push_pull";  // Or push, pull.
  std::string mode = "bsp";      // Or asp, with push_pull: nobody waits for another.
  WireOptions wire;
  int repeats = 30;
};

// Runs servers and workers on threads of this process, connected as they would be between processes of this machine,
// with gradients and weights in the client's memory, with sgd. In bsp a repeat takes as long as its slowest worker; in
// asp each worker's are counted. Beside them the baselines, each of as many bytes in one piece: the raw stream (not
// with shm, which has none), memcpy, SGD in place, and for a push_pull of several workers MPI_Allreduce among as many
// ranks, alone and followed by each rank's own step of SGD, where MPI is installed (its bytes are counted like the
// exchange's). Ratios are to the first row. The weights that come of the exchange are compared with those that have to,
// in bsp in every repeat, in asp once all are done; a difference is an error.
absl::StatusOr<std::vector<Measurement>> RunExchangeBench(const ExchangeBenchOptions& options);

}  // namespace ps
