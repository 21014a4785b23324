// The streams that members keep open, and what each was told last. Not thread-safe: its owner locks, and sends through
// an outbox.
#pragma once

#include <functional>
#include <map>
#include <optional>

#include "common/clock.h"
#include "common/outbox.h"
#include "ps/v1/ps.pb.h"
#include "server/chief/job_state.h"

namespace ps {

class MemberStreams {
 public:
  // Sends a member its state; nothing: it is no longer a member, or has opened another stream.
  using SendFunction = std::function<void(const std::optional<v1::HeartbeatReply>&)>;

  // The stream is of the member that has this rank now.
  void Add(uint64_t watch, uint32_t rank, SendFunction send) {
    streams_[watch] = {.rank = rank, .send = std::move(send), .told = {}};
  }
  void Remove(uint64_t watch) { streams_.erase(watch); }

  // Sends each member its state if it changed; ends the streams that are no member's any more.
  void Tell(const JobState& job, TimePoint now, CallOutbox& outbox);

 private:
  // What is worth a message of its own.
  struct News {
    v1::Phase phase = v1::PHASE_UNSPECIFIED;
    bool initialise = false;
    bool lead = false;
    bool leave = false;
    uint64_t checkpoint_version = 0;
    bool operator==(const News&) const = default;
  };
  struct Stream {
    uint32_t rank = 0;
    SendFunction send;
    News told;
  };

  std::map<uint64_t, Stream> streams_;  // By the number of the watch.
};

}  // namespace ps
