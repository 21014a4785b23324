// The shard's side of shared memory: takes in members of this host and user, each with a LocalLink on a thread of its
// own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/local/local_channel.h"
#include "common/local/local_socket.h"
#include "common/local/shared_memory.h"
#include "common/sync.h"
#include "ps/v1/local.pb.h"
#include "server/shard/push_pull_session.h"
#include "server/transport/listener.h"

namespace ps {

// One member's link through shared memory: the adapter between a LocalChannel and sessions, as DataCall is over gRPC.
// What is said is in proto/ps/v1/local.proto.
//
// The member is not trusted: what it says is checked, its memory may change at any time, and its limits are those of a
// member over gRPC. Whatever breaks the rules ends the link, and nothing else.
//
// Owned by a shared_ptr: calls that the shard has yet to answer keep it. Lock order: its lock, then the channel's.
class LocalLink : public std::enable_shared_from_this<LocalLink> {
 public:
  // The shard outlives it.
  LocalLink(Shard& shard, LocalSocket socket) : shard_(shard), socket_(std::move(socket)) {}

  // Once, on a thread of its own: greets the other side, asks `admit` whether this member may have a link (an error
  // says why not), and answers its calls until the link ends. Then nothing of it waits at the shard or is pinned.
  absl::Status Run(const std::function<absl::Status(const v1::Identity& id)>& admit);
  // For messages: whose link it is. Only Run's thread may ask, once that is known.
  std::string Name() const;
  // Ends the link if the member holds on to more versions that are not the newest than it may. From any thread.
  void Tick(TimePoint now, uint64_t version);
  // Ends Run soon. From any thread.
  void Close();
  // Called after Run. The version that the member may still be reading, though its link is gone; nothing where all read
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
  absl::Status Greet(const std::function<absl::Status(const v1::Identity&)>& admit);
  absl::Status OnMessage(const std::string& message);
  absl::Status Begin(const v1::LocalRequest& request);
  absl::Status AddSlices(const std::shared_ptr<Call>& call, const v1::LocalRequest& request);
  absl::StatusOr<std::vector<ReceivedSlice>> SlicesIn(Call& call, const v1::LocalRequest& request);
  absl::StatusOr<std::shared_ptr<SharedMemory>> MemoryOf(uint32_t number, size_t bytes);
  absl::Status TakeMemory(TimePoint deadline);
  void Release(const v1::LocalRequest& request);
  std::shared_ptr<Call> Find(uint64_t call);
  // The call's answer: once, from any thread.
  void Answer(const Call& call, absl::StatusOr<ShardAnswer> answer);
  // The number under which the other side knows this memory, sent to it if it is new.
  absl::StatusOr<uint32_t> Tell(const SharedMemory& memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End();

  Shard& shard_;
  // Run's thread uses these.
  std::atomic<uint32_t> rank_ = 0;                              // A copy of id_'s, which any thread reads for messages.
  v1::Identity id_;                                             // Known since the greeting.
  std::map<uint32_t, std::shared_ptr<SharedMemory>> memories_;  // The member's, by its number.
  std::shared_ptr<const ShardLayout> layout_;
  std::optional<ModelMemory> model_;
  std::optional<VersionPin> view_;  // Set at the end.

  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  LocalSocket socket_;                     // Until there is a channel: then that is it.
  std::unique_ptr<LocalChannel> channel_;  // Set once, by Run's thread.
  std::map<uint64_t, std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);  // Those that are not answered.
  std::map<uint64_t, Pinned> pins_ ABSL_GUARDED_BY(mutex_);                  // By calls that are not released.
  std::map<uint64_t, uint32_t> told_ ABSL_GUARDED_BY(mutex_);                // Numbers, by SharedMemory::identity.
};

// Thread-safe. Lock order: its lock, then a link's.
class LocalService {
 public:
  // OK if this system has what it takes; else the error names the flag.
  static absl::Status CheckSupported();
  // Listens at the path, or, if it is empty, at a new name. Errors name the flag. The shard outlives it.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(Shard& shard, const std::string& path);
  // Ends all links.
  ~LocalService();

  // The address that ShardInfo.local_socket tells.
  const std::string& address() const { return listener_.address(); }
  // Ends the links of those who are no members any more.
  void Tick();
  // The ranks that have a link, ascending.
  std::vector<uint32_t> ranks() const;

 private:
  struct Entry {
    std::shared_ptr<LocalLink> link;
    std::thread thread;
    bool admitted = false;
    bool ending = false;  // It was told to end before it was admitted.
    bool over = false;
  };
  using Entries = std::list<Entry>;

  LocalService(Shard& shard, std::unique_ptr<UnixLock> path_lock, LocalListener listener);
  void Accept();
  // False: there is no thread for it.
  bool Add(LocalSocket socket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndOldestStranger() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Warn(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(Entries::iterator entry);
  // Lets a member have this link: a member has one, so its link before is ended.
  absl::Status Admit(const v1::Identity& id, Entry& entry);
  // Joins the threads of links that are over.
  void Collect();

  Shard& shard_;
  const std::unique_ptr<UnixLock> path_lock_;  // Where it listens at a path; outlives the socket.
  LocalListener listener_;

  mutable Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  size_t strangers_ ABSL_GUARDED_BY(mutex_) = 0;  // So many of them are not admitted.
  TimePoint warn_at_ ABSL_GUARDED_BY(mutex_);     // It does not warn before.
  struct Member {
    uint64_t incarnation = 0;
    std::shared_ptr<LocalLink> link;
  };
  std::map<uint32_t, Member> members_ ABSL_GUARDED_BY(mutex_);  // The key is the rank.
  // What members whose link has ended may still be reading, for as long as they are members: one version each, which
  // counts as one that they hold (Readers::May).
  struct View {
    uint64_t incarnation = 0;
    std::optional<VersionPin> pin;
  };
  std::map<uint32_t, View> views_ ABSL_GUARDED_BY(mutex_);  // The key is the rank.
  std::thread accepting_;
};

}  // namespace ps
