// The batches of a job whose chief hands out runs of samples (--budget=job): each is taken when the worker is ready for
// it, until the whole job's are used.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "ps/client.h"
#include "worker/train/batches.h"

namespace ps {

struct HandedOutRunsOptions {
  // What SamplerOptions say of the training split. A batch is a run of batch_size samples of an epoch's permutation;
  // `full` (0) is one worker's part of the samples.
  int64_t samples = 0;
  int64_t batch_size = 0;
  uint64_t seed = 1;
  bool shuffle = true;
  int32_t num_workers = 1;
  // The whole job's: `epochs` of runs, or as many for each worker as `steps`, if that is not 0.
  double epochs = 1;
  int64_t steps = 0;
  // Others need a contribution of this worker to every step, if only an empty one: while it has to wait for a run it
  // gets batches without samples.
  bool fills_steps = false;
  // Client::TakeRun.
  std::function<absl::StatusOr<TakenRun>(const RunRequest&)> take_run;
};

// The place of a batch is its run's number; that of one without samples is the last run's. It skips to no step.
// INVALID_ARGUMENT as of Sampler::Create.
absl::StatusOr<std::unique_ptr<BatchSource>> MakeHandedOutRuns(const HandedOutRunsOptions& options);

}  // namespace ps
