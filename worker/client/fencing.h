// What a server answers to whom it does not take for a member.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace ps {

// Another worker owns the sender's rank, or another generation of the job runs: the status does not say which. The
// chief does (HeartbeatReply.generation).
inline bool IsFenced(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && absl::StrContains(status.message(), "fenced");
}

}  // namespace ps
