// One member's link through shared memory: the adapter between a LocalChannel and sessions, as DataCall is over gRPC.
// What is said is in proto/ps/v1/local.proto.
//
// The member is not trusted: what it says is checked, its memory may change at any time, and its limits are those of a
// member over gRPC. Whatever breaks the rules ends the link, and nothing else.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/local/local_channel.h"
#include "common/local/model_memory.h"
#include "common/sync.h"
#include "ps/v1/local.pb.h"
#include "server/push_pull_session.h"

namespace ps {

// Owned by a shared_ptr: calls that the shard has yet to answer keep it. Lock order: its lock, then the channel's.
class LocalLink : public std::enable_shared_from_this<LocalLink> {
 public:
  // The shard outlives it.
  LocalLink(Shard& shard, const WaitLimits& limits, LocalSocket socket)
      : shard_(shard), limits_(limits), socket_(std::move(socket)) {}

  // Once, on a thread of its own: greets the other side, asks `admit` whether this member may have a link (an error
  // says why not), and answers its calls until the link ends. Then nothing of it waits at the shard or is pinned.
  absl::Status Run(const std::function<absl::Status(const v1::Identity& id)>& admit);
  // For messages: whose it is. Of Run's thread, once it is known.
  std::string Name() const;
  // Ends the link if the member holds on to a version that is not the newest any more. From any thread.
  void Tick(TimePoint now, uint64_t version);
  // Ends Run soon. From any thread.
  void Close();

 private:
  struct Call;
  struct Pinned {
    VersionPin pin;
    std::optional<TimePoint> old_since = std::nullopt;  // It was first seen not to be the newest.
  };
  absl::Status Greet(const std::function<absl::Status(const v1::Identity&)>& admit);
  absl::Status OnMessage(const std::string& message);
  absl::Status Begin(const v1::LocalRequest& request);
  absl::Status AddSlices(const std::shared_ptr<Call>& call, const v1::LocalRequest& request);
  absl::StatusOr<std::vector<ReceivedSlice>> SlicesIn(Call& call, const v1::LocalRequest& request);
  absl::StatusOr<std::shared_ptr<SharedMemory>> MemoryOf(uint32_t number, size_t bytes);
  absl::Status TakeMemory(TimePoint deadline);
  void Finish(const std::shared_ptr<Call>& call);
  void Release(const v1::LocalRequest& request);
  void Cancel(const std::shared_ptr<Call>& call);
  std::shared_ptr<Call> Find(uint64_t call);
  // The call's answer: once, from any thread.
  void Answer(uint64_t call, absl::StatusOr<PushPullSession::Reply> reply, bool push_only);
  // The number under which the other side knows this memory, sent to it if it is new.
  absl::StatusOr<uint32_t> Tell(const SharedMemory& memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End();

  Shard& shard_;
  const WaitLimits limits_;
  // Run's thread uses them.
  std::atomic<uint32_t> rank_ = 0;                              // The same as id_'s, for messages. From any thread.
  v1::Identity id_;                                             // Since the greeting.
  std::map<uint32_t, std::shared_ptr<SharedMemory>> memories_;  // The member's, by its number.
  std::shared_ptr<const ShardLayout> layout_;
  std::optional<ModelMemory> model_;

  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  LocalSocket socket_;                     // Until there is a channel: then that is it.
  std::unique_ptr<LocalChannel> channel_;  // Set once, by Run's thread.
  std::map<uint64_t, std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);  // Not answered.
  std::map<uint64_t, Pinned> pins_ ABSL_GUARDED_BY(mutex_);                  // Calls that are not released hold them.
  std::map<uint64_t, uint32_t> told_ ABSL_GUARDED_BY(mutex_);                // Numbers, by SharedMemory::identity.
};

}  // namespace ps
