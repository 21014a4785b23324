// One member's link through shared memory, on the shard's side. What is said is in proto/ps/v1/local.proto.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/local/local_channel.h"
#include "common/local/local_socket.h"
#include "common/local/shared_memory.h"
#include "common/sync.h"
#include "ps/v1/local.pb.h"
#include "server/shard/push_pull_session.h"
#include "server/transport/call_counts.h"

namespace ps {

// The adapter between a LocalChannel and sessions, as DataCall is over gRPC. Its messages are read by the thread of the
// LocalService, which reads those of all links. Where many slices are copied or unpacked, a thread of the shard's pool
// does that, and meanwhile no other message of this link is read.
//
// The member is not trusted: what it says is checked, its memory may change at any time, and its limits are those of a
// member over gRPC. Whatever breaks the rules ends the link, and nothing else.
//
// Owned by a shared_ptr: calls that the shard has yet to answer keep it. Lock order: its lock, then the channel's.
class LocalLink : public std::enable_shared_from_this<LocalLink> {
 public:
  using Admit = std::function<absl::Status(const v1::Identity& id)>;

  // The shard and the counts outlive it. `wakes` wakes the service's thread.
  LocalLink(Shard& shard, CallCounts& counts, LocalSocket socket, std::shared_ptr<const FileDescriptor> wakes)
      : shard_(shard), counts_(counts), wakes_(std::move(wakes)), socket_(std::move(socket)) {}

  // ---- For the service's thread

  // Takes the greeting, asks `admit` whether this member may have a link (an error says why not), and answers. False:
  // the greeting is not here yet.
  absl::StatusOr<bool> Greet(const Admit& admit);
  // After Greet: takes a few messages, if there are any. Returns whether there were. An error: the link is over;
  // CANCELLED if that was decided here, or the member has ended it.
  absl::StatusOr<bool> Serve();
  // The member has ended, or its connection has: what it said before is still served.
  void PeerEnded() { peer_ended_ = true; }
  // Once, when the link is over: then nothing of it waits at the shard or is pinned.
  void End();
  // For messages: whose link it is, once that is known.
  std::string Name() const;
  // After Greet. Null before.
  LocalChannel* channel() { return channel_.get(); }
  // Serve has something to do.
  bool has_work() const { return !busy_ && (peer_ended_ || channel_->has_message()); }

  // Ends the link if the member holds on to more versions that are not the newest than it may. From any thread.
  void Tick(TimePoint now, uint64_t version);
  // Ends the link soon. From any thread.
  void Close();
  // Called after End. The version that the member may still be reading, though its link is gone; nothing where all read
  // the same one, which then stays.
  std::optional<VersionPin> TakeView() { return std::exchange(view_, std::nullopt); }

 private:
  // A member may read a version for any time while the others go on: there is a buffer for that.
  bool keeps_views() const { return shard_.allows_views() && !shard_.exact_versions(); }
  struct Call;
  struct Pinned {
    VersionPin pin;
    std::optional<TimePoint> old_since = std::nullopt;  // It was first seen not to be the newest.
  };
  absl::Status OnMessage(const std::string& message);
  absl::Status Begin(const v1::LocalRequest& request);
  absl::Status AddSlices(const std::shared_ptr<Call>& call, const v1::LocalRequest& request);
  // Whether the shard copies or unpacks so much of them that it takes long.
  bool TakeLong(const std::vector<ReceivedSlice>& slices) const;
  void AddToSession(Call& call, std::vector<ReceivedSlice> slices, bool last);
  absl::StatusOr<std::vector<ReceivedSlice>> SlicesIn(Call& call, const v1::LocalRequest& request);
  absl::StatusOr<std::shared_ptr<SharedMemory>> MemoryOf(uint32_t number, size_t bytes);
  absl::Status TakeMemory();
  void Release(const v1::LocalRequest& request);
  std::shared_ptr<Call> Find(uint64_t call);
  // The call's answer: once, from any thread.
  void Answer(const Call& call, absl::StatusOr<ShardAnswer> answer);
  // The number under which the other side knows this memory, sent to it if it is new.
  absl::StatusOr<uint32_t> Tell(const SharedMemory& memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Shard& shard_;
  CallCounts& counts_;
  const std::shared_ptr<const FileDescriptor> wakes_;
  std::atomic<bool> busy_ = false;  // The pool is at a message of this link.
  // The service's thread uses these.
  bool peer_ended_ = false;
  std::atomic<uint32_t> rank_ = 0;                              // A copy of id_'s, which any thread reads for messages.
  v1::Identity id_;                                             // Known since the greeting.
  std::map<uint32_t, std::shared_ptr<SharedMemory>> memories_;  // The member's, by its number.
  std::shared_ptr<const ShardLayout> layout_;
  std::optional<ModelMemory> model_;
  std::optional<VersionPin> view_;  // Set at the end.

  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  LocalSocket socket_;                     // Until there is a channel: then that is it.
  std::unique_ptr<LocalChannel> channel_;  // Set once, by Greet.
  std::map<uint64_t, std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);  // Those that are not answered.
  std::map<uint64_t, Pinned> pins_ ABSL_GUARDED_BY(mutex_);                  // By calls that are not released.
  std::map<uint64_t, uint32_t> told_ ABSL_GUARDED_BY(mutex_);                // Numbers, by SharedMemory::identity.
};

}  // namespace ps
