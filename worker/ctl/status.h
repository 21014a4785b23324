// ps_ctl status: the job, its shards and its workers, in words.
#pragma once

#include "absl/status/status.h"
#include "worker/ctl/job_calls.h"

namespace ps {

// To stdout. A shard that does not answer is printed with its problem, and is the error that is returned.
absl::Status PrintStatus(JobCalls& calls);

}  // namespace ps
