// MPI beside the exchange, where it is installed: runs ps_bench_mpi (mpi_ranks.cc) on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// Seconds of each repeat of an MPI_Allreduce of `bytes` among so many ranks, over TCP or through shared memory. `sgd`:
// and of the step that each rank then takes with the mean, on weights of its own, in one thread. NOT_FOUND where
// mpirun, or the program that it is to run, is not there; INTERNAL if it failed, or the sum or the weights were wrong.
absl::StatusOr<std::vector<double>> MeasureMpiAllreduce(bool tcp, int64_t bytes, uint32_t ranks, int repeats, bool sgd);

// Where and how ranks run: what mpirun's command line begins with, and options of its own. Both go through a shell.
struct MpiPlace {
  std::string before;
  std::string options;
  int limit_s = 600;
};

struct MpiAllreduce {
  std::vector<double> seconds;  // What each repeat took on the slowest rank.
  double processors = 0;        // That all ranks together kept busy meanwhile, on the average.
};

// The same, in a place.
absl::StatusOr<MpiAllreduce> MeasureMpiAllreduceIn(const MpiPlace& place, int64_t bytes, uint32_t ranks, int repeats,
                                                   bool sgd = false);

// samples/s of all ranks together, training the network: the better of an MPI_Iallreduce of each layer's gradient
// during the backward pass, and one MPI_Allreduce of all of them after it. Errors are those of MeasureMpiAllreduce.
absl::StatusOr<double> MeasureMpiTraining(bool tcp, const std::vector<int64_t>& widths, int64_t batch, uint32_t ranks,
                                          int64_t steps);

}  // namespace ps
