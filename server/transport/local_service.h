// The shard's side of shared memory: takes in members of this host and user, and reads what all their links say, on one
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/local/local_socket.h"
#include "common/sync.h"
#include "server/transport/listener.h"
#include "server/transport/local_link.h"

namespace ps {

// Its thread looks at the rings of all links in turn. Where nothing has come for a while it sleeps until something does
// at the rings, the sockets or the listener (epoll(7)).
//
// Thread-safe. Lock order: its lock, then a link's, then the channel's.
class LocalService {
 public:
  // OK if this system has what it takes; else the error names the flag.
  static absl::Status CheckSupported();
  // Listens at the path, or, if it is empty, at a new name. Errors name the flag. The shard and the
  // counts outlive it.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(Shard& shard, CallCounts& counts, const std::string& path);
  // Ends all links.
  ~LocalService();

  // The address that ShardInfo.local_socket tells.
  const std::string& address() const { return listener_.address(); }
  // Ends the links of those who are no members any more.
  void Tick();
  // The ranks that have a link, ascending.
  std::vector<uint32_t> ranks() const;

 private:
  // A caller is a stranger until it has greeted and was let in.
  struct Caller {
    std::shared_ptr<LocalLink> link;
    bool admitted = false;
    TimePoint greets_until;
  };
  using Callers = std::map<uint64_t, Caller>;  // By a number, which grows.

  LocalService(Shard& shard, CallCounts& counts, std::unique_ptr<UnixLock> path_lock, LocalListener listener,
               FileDescriptor poll, std::shared_ptr<const FileDescriptor> wakes);

  // ---- The thread's
  void Run();
  // Reads what links say. Returns whether any said anything.
  bool Serve();
  // Looks at sockets and bells, and waits for them if it `sleeps`. Returns whether there was anything.
  bool Look(bool sleeps);
  // When a sleep has to end at the latest.
  TimePoint NextDeadline();
  void Accept();
  void Add(LocalSocket socket);
  void SetListening(bool listens);
  // Something has happened at this caller's socket.
  void OnSocket(uint64_t number);
  void EndLateStrangers();
  // It is over.
  Callers::iterator End(Callers::iterator caller, const absl::Status& why);
  void Warn(const std::string& why);

  // Lets a member have this link: a member has one, so its link before is ended.
  absl::Status Admit(const v1::Identity& id, Caller& caller);

  Shard& shard_;
  CallCounts& counts_;
  const std::unique_ptr<UnixLock> path_lock_;  // Where it listens at a path; outlives the socket.
  LocalListener listener_;

  const FileDescriptor poll_;  // epoll's.
  const std::shared_ptr<const FileDescriptor> wakes_;
  std::atomic<bool> stopping_ = false;

  // The thread uses these.
  Callers callers_;
  uint64_t last_number_ = 1;             // 0 and 1 are the listener's and the bells'.
  size_t strangers_ = 0;                 // So many of them are not admitted.
  TimePoint warn_at_;                    // It does not warn before.
  std::optional<TimePoint> listens_at_;  // Until then it accepts nobody.

  mutable Mutex mutex_;
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
  std::thread thread_;
};

}  // namespace ps
