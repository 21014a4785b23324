// What went wrong with a job, as often as its chief's process has seen it: a process counts on where the job goes on as
// another generation.
#pragma once

#include <cstdint>

namespace ps {

struct JobCounts {
  uint64_t rollbacks = 0;
  uint64_t worker_losses = 0;
  uint64_t checkpoint_failures = 0;
  uint64_t dropped_reports = 0;
};

}  // namespace ps
