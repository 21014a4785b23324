// The shard's side of shared memory: takes in members of this host and user, each with a LocalLink on a thread of its
// own.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/local/local_socket.h"
#include "common/sync.h"
#include "server/local_link.h"
#include "server/unix_lock.h"

namespace ps {

// Thread-safe. Lock order: its lock, then a link's.
class LocalService {
 public:
  // OK if this system has what it takes; else the error names the flag.
  static absl::Status CheckSupported();
  // Listens at the path, or, if it is empty, at a new name. Errors name the flag. The shard outlives it.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(Shard& shard, const WaitLimits& limits,
                                                             const std::string& path);
  // Ends all links.
  ~LocalService();

  // As in ShardInfo.local_socket.
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

  LocalService(Shard& shard, const WaitLimits& limits, std::unique_ptr<UnixLock> path_lock, LocalListener listener);
  void Accept();
  // False: there is no thread for it.
  bool Add(LocalSocket socket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndOldestStranger() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Warn(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(Entries::iterator entry);
  // A member has one link; a new one ends the one before.
  absl::Status Admit(const v1::Identity& id, Entry& entry);
  // Joins the threads of links that are over.
  void Collect();

  Shard& shard_;
  const WaitLimits limits_;
  const std::unique_ptr<UnixLock> path_lock_;  // Where it listens at a path; outlives the socket.
  LocalListener listener_;

  mutable Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  size_t strangers_ ABSL_GUARDED_BY(mutex_) = 0;  // So many of them are not admitted.
  TimePoint warn_at_ ABSL_GUARDED_BY(mutex_);     // Not before this.
  struct Member {
    uint64_t incarnation = 0;
    std::shared_ptr<LocalLink> link;
  };
  std::map<uint32_t, Member> members_ ABSL_GUARDED_BY(mutex_);  // By rank.
  std::thread accepting_;
};

}  // namespace ps
