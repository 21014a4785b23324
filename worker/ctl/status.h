// ps_ctl status: the job, its shards and its workers, in words.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ps/v1/ps.pb.h"
#include "worker/ctl/job_calls.h"

namespace ps {

// To stdout. A shard that does not answer is printed with its problem, and is the error that is returned.
absl::Status PrintStatus(JobCalls& calls);

// ps_ctl set: what its arguments ask for, and what is said of the answer.

// Reads NAME=VALUE arguments. INVALID_ARGUMENT names every one that is not of this form, or whose value is not a
// number, one a line; the chief checks names and ranges, and what is said of a schedule (common/schedule.h), which is
// text.
absl::StatusOr<v1::SetHyperparametersRequest> ParseAssignments(const std::vector<std::string>& arguments);

// "learning_rate=0.01 momentum=0.5 from version 1234 on", or by shard where the versions differ:
// "learning_rate=0.01 from version 7 on shard 0, 8 on shard 1".
std::string DescribeChange(const v1::SetHyperparametersRequest& request, const v1::SetHyperparametersReply& reply);

// "learning_rate=0.01 momentum=0.5"
std::string DescribeValues(const google::protobuf::RepeatedPtrField<v1::Hyperparameter>& values);

}  // namespace ps
