// What a member is told by its chief, on the stream that it keeps open and in the answers to its heartbeats.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// Called from threads of gRPC; they must not block.
struct ChiefCallbacks {
  std::function<void(const v1::HeartbeatReply&)> on_state;
  // The chief refused it for good: the rank has another owner, or the job is over.
  std::function<void(const absl::Status&)> on_refused;
  // The chief has closed the stream in order. May be empty.
  std::function<void()> on_closed = {};
};

// No state follows this one: the job has ended, or its generation.
inline bool JobIsOver(const v1::HeartbeatReply& state) {
  const bool ended = state.phase() != v1::PHASE_GATHERING && state.phase() != v1::PHASE_RUNNING;
  return ended || state.generation() != 0;
}

}  // namespace ps
