// The open calls of a server: limits their number, and cancels those that make no progress.
//
// A call counts as a stranger's until its first message shows that a member of the job sent it, or until it is adopted
// by whoever has a limit of his own for such calls. All strangers together have one limit, each member has its own.
// Each message has a deadline: a fixed time plus a time for each byte to be received or sent. Only a member in the
// middle of sending has no deadline, for as long as it is a member. While a call waits for the shard it has no deadline
// here: the shard ends the wait.
//
// Thread-safe. Lock order: the watch's lock, then the shard's (Tick asks for the members); and gRPC's own, which
// `cancel` takes. It must not come back here on the same thread (grpc::ServerContextBase::TryCancel runs reactions in
// threads of gRPC).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/generic/async_generic_service.h>
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/status.h"
#include "common/sync.h"
#include "server/transport/call_counts.h"

namespace ps {

struct CallLimits {
  size_t strangers = 256;   // Calls of others than members.
  size_t of_a_member = 64;  // Calls of one member.
  // Least progress: a message must be received or sent within this time plus its bytes at this rate.
  std::chrono::nanoseconds grace = std::chrono::seconds(10);
  uint64_t bytes_per_s = 32 << 10;
};

class CallWatch {
 public:
  // Incarnations of the job's members, by rank.
  using Members = std::map<uint32_t, uint64_t>;

  explicit CallWatch(const CallLimits& limits) : limits_(limits) {}

  // A new call, a stranger's. `cancel` may be called until Remove has returned; `peer` is for the log. Past the limit
  // the oldest stranger's call whose next message is still awaited is cancelled for it, so that idle calls keep nobody
  // out; RESOURCE_EXHAUSTED if there is none; then it is not watched.
  absl::Status Add(const void* call, std::string peer, std::function<void()> cancel);
  // The call is over, whether or not it was watched.
  void Remove(const void* call);

  // The caller turned out to be this member. RESOURCE_EXHAUSTED past the member's limit; it then stays a stranger's.
  absl::Status Identify(const void* call, uint32_t rank, uint64_t incarnation);

  // Whoever calls this limits such calls himself: the call is no stranger's any more, but has the same deadlines as
  // one.
  void Adopt(const void* call);

  // A message of at most `bytes` is expected from the caller. No deadline if it is a member.
  void Receiving(const void* call, size_t bytes, TimePoint now);
  // The message is here, or may come at any time.
  void Received(const void* call);
  // A message of `bytes` is being sent to the caller, perhaps while another is expected.
  void Sending(const void* call, size_t bytes, TimePoint now);
  // The message is on its way.
  void Sent(const void* call);
  // The call ends with such a message, and expects nothing any more.
  void Ending(const void* call, size_t bytes, TimePoint now);

  // Cancels the calls that are late, and those that expect a message from a caller that is no longer a member.
  // `members` is called under the lock, so that it knows of every member whose call was identified.
  void Tick(TimePoint now, const std::function<Members()>& members);

  size_t open_calls() const;

  // What the calls carry, and how they end: each counts for itself.
  CallCounts& counts() { return counts_; }

 private:
  struct Call {
    std::string peer;
    std::function<void()> cancel;
    std::optional<std::pair<uint32_t, uint64_t>> member;  // Rank and incarnation.
    std::optional<TimePoint> receive_by = {};
    std::optional<TimePoint> send_by = {};
    bool receiving = false;  // It receives from a member, while it is one.
    uint64_t number = 0;     // It grows in the order of Add.
    bool evicted = false;    // Cancelled to make room; no longer counted.
    bool adopted = false;    // Counted by another.

    bool stranger() const { return !member.has_value() && !evicted && !adopted; }
  };
  // Cancels the oldest stranger's call whose message is awaited. Returns whether there was one.
  bool EvictIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The call is no stranger's any more.
  void Uncount(const Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetAwaited(Call& call, bool awaited) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::chrono::nanoseconds TimeFor(size_t bytes) const;
  void EndReceiving(Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Call* Find(const void* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const CallLimits limits_;
  CallCounts counts_;
  mutable Mutex mutex_;
  std::map<const void*, Call> calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t strangers_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Call*> idle_ ABSL_GUARDED_BY(mutex_);  // Those of strangers whose message is awaited, by number.
  std::map<std::pair<uint32_t, uint64_t>, size_t> of_members_ ABSL_GUARDED_BY(mutex_);
};

// The calls of a server, by their paths: gRPC gives all of them to one generic service, on raw bytes, so that each is
// counted and watched from its first byte on and nothing parses a message whose size nobody has looked at.
// Thread-safe once it is set up.
class CallRouter final : public grpc::CallbackGenericService {
 public:
  // Makes and begins one call; an error refuses it.
  using Maker =
      std::function<absl::StatusOr<grpc::ServerGenericBidiReactor*>(const grpc::GenericCallbackServerContext&)>;

  explicit CallRouter(const CallLimits& limits) : watch_(limits) {}

  // ---- Setting up, before the gRPC server starts

  // Calls of this path ("/ps.v1.Chief/Join") are made by `maker`. A path has one maker.
  void Handle(const std::string& path, Maker maker);
  // The same for a kind of call that is made of a watch, a context and these arguments, which outlive the server.
  template <typename Call, typename... Args>
  void HandleWith(const std::string& path, Args&... args) {
    Handle(path, [this, &args...](const grpc::GenericCallbackServerContext& context) {
      return Begun(std::make_shared<Call>(watch_, context, args...));
    });
  }
  // Whose calls are handled by now: "ps.v1.Chief".
  std::set<std::string> Services() const;
  // Calls of paths that begin with `prefix` and that nobody handles get this error, not UNIMPLEMENTED.
  void Refuse(const std::string& prefix, const absl::Status& error) { refusals_.emplace_back(prefix, error); }

  // For a maker: begins the call, which then owns itself.
  template <typename Call>
  static absl::StatusOr<grpc::ServerGenericBidiReactor*> Begun(const std::shared_ptr<Call>& call) {
    PS_RETURN_IF_ERROR(call->Begin());
    return call.get();
  }

  // ---- While it runs

  // Cancels calls that do not move on. `members` knows every member whose call was identified.
  void Tick(TimePoint now, const std::function<CallWatch::Members()>& members) { watch_.Tick(now, members); }

  size_t open_calls() const { return watch_.open_calls(); }
  CallWatch& watch() { return watch_; }

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  absl::Status RefusalOf(const std::string& path) const;

  CallWatch watch_;
  std::map<std::string, Maker> makers_;  // Constant while the server runs.
  std::vector<std::pair<std::string, absl::Status>> refusals_;
};

}  // namespace ps
