// What members, shards and operators are told of a job.
#pragma once

#include <optional>
#include <string>

#include "common/clock.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/job_state.h"

namespace ps {

// Whom a worker that has no run left to take waits for: the workers that have not finished their runs.
std::string WaitingForRuns(const JobState& job, TimePoint now);

// The present view, for shards.
v1::View MakeView(const JobState& job, TimePoint now);

// The same as a difference (View.since) from the one before; nothing: the view has to be sent whole. Both are whole.
std::optional<v1::View> ViewChanges(const v1::View& before, const v1::View& view);

// For a member whose join's view is in force.
v1::JoinReply MakeJoinReply(const JobState& job, const Member& member);

// For a member, at each change and heartbeat.
v1::HeartbeatReply MakeMemberState(const JobState& job, const Member& member, TimePoint now);

v1::StatusReply MakeStatus(const JobState& job, TimePoint now);

}  // namespace ps
