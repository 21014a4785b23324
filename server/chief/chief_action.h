// What the chief decides is to be done, as values: ChiefCore says it, and Chief does it. Calls, connections and streams
// are known by the numbers that Chief has given them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "common/metrics.h"
#include "ps/v1/ps.pb.h"

namespace ps {

struct ToShard {
  uint64_t connection = 0;
  v1::ChiefUpdate update;
};

// Nothing: the stream ends, since it is no member's any more.
struct ToMember {
  uint64_t watch = 0;
  std::optional<v1::HeartbeatReply> state;
};

// Ends a call.
template <typename Reply>
struct Answer {
  uint64_t call = 0;
  absl::StatusOr<Reply> reply;
};

// Makes the checkpoint with this manifest complete. ChiefCore::OnCommitted is to follow.
struct CommitCheckpoint {
  Manifest manifest;
};

// Once: this generation is over, and the job goes on as another, which is to be higher than `heard_of` and not to begin
// with `damaged`, the path of a checkpoint, unless that is empty.
struct RollBack {
  std::string reason;
  std::string damaged;
  uint64_t heard_of = 0;
};

// The job is finished or failed (PHASE_FINISHED, PHASE_FAILED), or was shut down. The `failure` of one that is finished
// says that no checkpoint of its end could be written; empty: nothing is missing.
struct Ended {
  v1::Phase phase = v1::PHASE_UNSPECIFIED;
  std::string failure;
};

using ChiefAction = std::variant<ToShard, ToMember, Answer<v1::JoinReply>, Answer<v1::DoneReply>,
                                 Answer<v1::TakeRunReply>, Answer<v1::ReduceReply>, Answer<v1::SetHyperparametersReply>,
                                 Answer<v1::CheckpointReply>, CommitCheckpoint, RollBack, Ended, WriteMetric>;

}  // namespace ps
