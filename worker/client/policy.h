// What the chief's answer to a join says of the mode.
#pragma once

#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// FAILED_PRECONDITION, naming the field, if the mode asks for what this client does not know or nobody could do.
absl::StatusOr<ModePolicy> PolicyOf(const v1::JoinReply& joined);

}  // namespace ps
