// ps_ctl status --watch and health --max_idle: a job that is looked at again and again.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ps/v1/ps.pb.h"
#include "worker/ctl/job_calls.h"

namespace ps {

// How WatchStatus shows the job.
enum class WatchForm {
  kScreen,  // A terminal's screen, drawn anew.
  kLines,   // A line a second.
  kJson,    // A line of JSON a second (common/history/job_json.h).
};

// Asks once a second until the job is over, and prints what it is told. OK once the job is finished or was shut down;
// the job's failure; or, when the chief cannot be reached for the calls' timeout, that error.
absl::Status WatchStatus(JobCalls& calls, WatchForm form);

// "21:04:05 step 1,041, 12.3 steps/s, 4 min left, loss 0.41, test accuracy 83.0 %; waiting …"
std::string WatchLine(const v1::StatusReply& status, absl::Time now);

// What fits on a screen of so many lines and columns; each line ends with a newline.
std::string WatchScreen(const v1::StatusReply& status, size_t lines, size_t columns);

// What a status says of how the job learns: "loss 0.41 (0.2 to 0.9 in 49 batches); test: accuracy 83.0 %, loss 0.5 at
// step 900". Empty: no worker has told any of it.
std::string DescribeLearning(const v1::StatusReply& status);

// A line for who is well. UNAVAILABLE: the job is running, but has made no version for longer than `max_idle`; says who
// is missing. FAILED_PRECONDITION: it has failed, or the server does not say.
absl::StatusOr<std::string> CheckIdle(const v1::StatusReply& status, absl::Duration max_idle);

}  // namespace ps
