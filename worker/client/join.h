// Becoming a member of a job.
#pragma once

#include "absl/status/statusor.h"
#include "ps/client.h"
#include "ps/v1/ps.pb.h"
#include "worker/client/chief_calls.h"

namespace ps {

// Asks the chief until it accepts the worker or refuses it; errors as of Client::Join. If no answer came, the join is
// cancelled at the chief, which takes at most 2 s.
absl::StatusOr<v1::JoinReply> JoinJob(ChiefCalls& chief, const ClientOptions& options, const Layout& layout);

// What the chief's answer to a join says of the mode.

// FAILED_PRECONDITION, naming the field, if the mode asks for what this client does not know or nobody could do.
absl::StatusOr<ModePolicy> PolicyOf(const v1::JoinReply& joined, const Layout& layout);

}  // namespace ps
