// What a call asks and is answered, as messages: the same on every transport.
#pragma once

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"
#include "worker/client/shard_link.h"

namespace ps {

// Without an identity and without slices.
v1::PushRequest PushHeaderOf(const CallRequest& request);
v1::PullRequest PullHeaderOf(const CallRequest& request);

// Adds what the message says to the reply. Of a call that only pushes the version is the push's; of another, the
// weights'. INVALID_ARGUMENT for what this client does not understand.
void TakePush(const v1::PushReply& push, bool only, ShardReply* reply);
absl::Status TakePull(const v1::PullReply& pull, ShardReply* reply);

}  // namespace ps
