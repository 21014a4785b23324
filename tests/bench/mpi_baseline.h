// MPI's allreduce beside the exchange, where MPI is installed.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace ps {

// Seconds of each repeat of an MPI_Allreduce of `bytes` among so many ranks on this machine, over TCP or through shared
// memory. NOT_FOUND where mpirun, or the program that it is to run, is not there.
absl::StatusOr<std::vector<double>> MeasureMpiAllreduce(bool tcp, int64_t bytes, uint32_t ranks, int repeats);

}  // namespace ps
