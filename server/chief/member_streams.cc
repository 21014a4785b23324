#include "server/chief/member_streams.h"

#include "server/chief/job_messages.h"

namespace ps {

void MemberStreams::Tell(const JobState& job, TimePoint now, CallOutbox& outbox) {
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    const auto found = job.members().members().find(stream->second.rank);
    if (found == job.members().members().end() || found->second.watch != stream->first) {
      outbox.Add([send = std::move(stream->second.send)] { send(std::nullopt); });
      stream = streams_.erase(stream);
      continue;
    }
    const Member& member = found->second;
    const News news = {.phase = job.phase(),
                       .initialise = job.MayInitialise(member.rank),
                       .lead = job.IsLead(member),
                       .leave = member.draining,
                       .checkpoint_version = job.checkpoint_version()};
    if (stream->second.told != news) {
      stream->second.told = news;
      outbox.Add([send = stream->second.send, state = MakeMemberState(job, member, now)] { send(state); });
    }
    ++stream;
  }
}

}  // namespace ps
