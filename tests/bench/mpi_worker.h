// What ps_worker trains, with MPI in place of servers: ps_bench_mpi worker.
#pragma once

#include "absl/status/status.h"
#include "worker/train/options.h"

namespace ps {

// Trains as a worker of this rank does in bsp, on the same batches and from the same weights, with momentum SGD. Each
// tensor's gradient is summed as soon as it is there, or, with --overlap=false, all of them by one MPI_Allreduce. Rank
// 0 then prints a line for each step: the mean loss over all ranks' samples, and the seconds from the first step's
// begin to this one's end. INVALID_ARGUMENT where a batch of an epoch is not whole.
absl::Status TrainAsWorker(const WorkerOptions& options, float learning_rate, int rank, int ranks);

}  // namespace ps
