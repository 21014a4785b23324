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

// The present view, for shards, without what grows with the model: a layout and the manifest of a checkpoint to restore
// have their place in it, and AddModel fills it. A chief has one layout and one such checkpoint.
v1::View MakeView(const JobState& job, TimePoint now);
void AddModel(const JobState& job, v1::View* view);

// The same view as a difference (View.since) from the one before, as MakeView made both; nothing: it has to be sent
// whole.
std::optional<v1::View> ViewChanges(const v1::View& before, const v1::View& view);

// For a member whose join's view is in force.
v1::JoinReply MakeJoinReply(const JobState& job, const Member& member);

// A member is told it at each change and heartbeat.
v1::HeartbeatReply MakeMemberState(const JobState& job, const Member& member, TimePoint now);

v1::StatusReply MakeStatus(const JobState& job, TimePoint now);

}  // namespace ps
