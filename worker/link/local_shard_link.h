// The link to a shard on the same host, through shared memory. What is said is in proto/ps/v1/local.proto.
//
// It makes the calls that send nothing, and those whose slices lie in shared memory (CallRequest.shared). The server is
// of the same user, but what it says is checked all the same.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/local/local_channel.h"
#include "common/slices.h"
#include "common/sync.h"
#include "ps/v1/local.pb.h"
#include "ps/v1/ps.pb.h"
#include "worker/link/shard_link.h"

namespace ps {

struct LocalTarget {
  std::string socket;   // ShardInfo.local_socket.
  std::string address;  // For messages.
  uint32_t shard = 0;
  const SlicePlan* plan = nullptr;  // Outlives the link.
  v1::Identity id;
  std::function<void(const std::string&)> on_lost;  // Called once, from a thread of the link, if it ends by itself.
};

// Connects, and is let in. The error says why there is no shared memory: UNAVAILABLE if nobody is there on this host.
absl::StatusOr<std::unique_ptr<ShardLink>> ConnectLocally(const LocalTarget& target, TimePoint deadline);

// What a link through shared memory and its calls have in common: the channel, the calls that are open, and the memory
// that each side knows of the other.
//
// Replies are taken by whoever waits for one (TakeReplies), and by its own thread while nobody does. Lock order: a
// call's lock, then the connection's; that of the turn is a leaf.
inline absl::Status LinkEnded() { return absl::UnavailableError("the link through shared memory has ended"); }

class LocalCall {
 public:
  virtual ~LocalCall() = default;
  virtual TimePoint deadline() const = 0;
  // One of these, once, on the thread that takes replies. `weights` is the server's memory, where there are some, and
  // `pin` what it is held by.
  virtual void OnReply(const v1::LocalReply& reply, const std::shared_ptr<const SharedMemory>& weights,
                       const std::shared_ptr<const void>& pin) = 0;
  virtual void End(const absl::Status& status) = 0;
};

// Its thread holds it, too.
class LocalConnection : public std::enable_shared_from_this<LocalConnection> {
 public:
  LocalConnection(LocalTarget target, LocalSocket socket, SharedMemory rings, FileDescriptor bell,
                  const v1::LocalWelcome& welcome)
      : applies_in_place(welcome.applies_in_place()),
        allows_views(welcome.allows_views()),
        target_(std::move(target)),
        channel_(std::move(socket), std::move(rings), std::move(bell)) {}

  // The server has said both.
  const bool applies_in_place;
  const bool allows_views;

  void Start() {
    thread_ = std::thread([self = shared_from_this()] { self->Run(); });
  }
  // Ends the calls that there are, and waits for the thread, unless this is it.
  void Stop();

  const LocalTarget& target() const { return target_; }
  bool ended() const { return ended_; }
  // The call's number; 0: the link has ended.
  uint64_t Register(const std::shared_ptr<LocalCall>& call);
  void Send(v1::LocalRequest request);
  // The server knows this memory, or may be told of it: it keeps a few pieces.
  bool Takes(const SharedMemory& memory);
  // The number under which the server knows this memory, sent to it if it is new; 0 if that was not possible.
  uint32_t Tell(const SharedMemory& memory);
  // The server may write again what this call has brought. It is told with the next message, or soon.
  void Release(uint64_t call);
  // The call ends with CANCELLED, on the thread that takes replies, unless it has ended.
  void Cancel(uint64_t call);
  // These are ShardLink's.
  bool TakeReplies(const std::function<bool()>& over, TimePoint deadline);
  void WakeTaker() { channel_.WakeReceiver(); }

 private:
  void Run();
  // Has the thread wait until it is its turn. False: the channel has ended.
  bool AwaitTurn();
  // Gives the turn back; without `goes_on` the channel has ended. A caller says when the thread may take its place.
  void LeaveTurn(bool goes_on, std::optional<TimePoint> thread_from);
  // Takes a message, or waits for one. False: the link has ended.
  bool Take(TimePoint deadline);
  absl::Status OnReply(const std::string& message);
  absl::StatusOr<std::shared_ptr<const SharedMemory>> MemoryOf(uint32_t number);
  std::shared_ptr<LocalCall> Extract(uint64_t call);
  void SendReleased();
  void SendCancel(uint64_t call);
  // Ends those that were cancelled, or whose time is over. Returns when the next one's is.
  TimePoint EndCalls();

  const LocalTarget target_;
  LocalChannel channel_;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> stopped_ = false;  // It ends because the client does.

  // Used by the one whose turn it is.
  std::map<uint32_t, std::shared_ptr<const SharedMemory>> memories_;  // The server's, by its number.
  TimePoint end_calls_at_;
  absl::Status why_;  // It has ended, unless the server has.

  // Whose turn it is to use the channel's receiving side.
  Mutex turn_mutex_;
  CondVar turn_left_;
  bool taken_ ABSL_GUARDED_BY(turn_mutex_) = false;
  bool caller_ ABSL_GUARDED_BY(turn_mutex_) = false;         // A caller has it, or waits until the thread leaves it.
  bool over_ ABSL_GUARDED_BY(turn_mutex_) = false;           // The channel has ended: nobody takes it any more.
  bool sleeps_long_ ABSL_GUARDED_BY(turn_mutex_) = false;    // The thread does, since a caller waits for long.
  TimePoint thread_from_ ABSL_GUARDED_BY(turn_mutex_) = {};  // Before, a caller may come back.

  Mutex mutex_;
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<LocalCall>> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> released_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> cancelled_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint32_t> told_ ABSL_GUARDED_BY(mutex_);  // Numbers, by SharedMemory::identity.
  std::thread thread_;
};

}  // namespace ps
