// ps_bench exchange: what a push, a pull or both cost through real servers, beside what the machine allows.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/bench/measurement.h"

namespace ps {

struct ExchangeBenchOptions {
  std::string transport = "tcp";  // Or unix.
  int64_t bytes = 16 << 20;       // Of the model, a multiple of 4.
  uint32_t workers = 1;
  uint32_t servers = 1;
  std::string op = "push_pull";  // Or push, pull.
  int repeats = 30;
};

// Runs servers and workers on threads of this process, over real sockets on this machine, and beside them the
// baselines: the raw stream, memcpy, SGD in place, and for a push_pull of several workers MPI_Allreduce of the same
// bytes among as many ranks, where MPI is installed (its bytes are counted like the exchange's). The weights that come
// of it are compared with those that have to; a difference is an error. In bsp, with sgd.
absl::StatusOr<std::vector<Measurement>> RunExchangeBench(const ExchangeBenchOptions& options);

}  // namespace ps
