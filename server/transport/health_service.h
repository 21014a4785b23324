// gRPC's standard health service (proto/grpc/health/v1/health.proto), for the server as a whole: a probe names no
// service. Its calls are limited like all others, which those of gRPC's own implementation are not.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/sync.h"
#include "server/transport/call_watch.h"

namespace ps {

// Thread-safe.
class HealthService {
 public:
  // Takes its calls from the router; both outlive the gRPC server. Not serving until it is set.
  explicit HealthService(CallRouter& router);

  // Sets what a probe is told from now on; those who watch are told at once.
  void SetServing(bool serving);
  // Sets whether there is room for connections; without room the server does not serve. At first there is room.
  void SetRoom(bool room);
  // Ends the streams of those who watch, so that the gRPC server need not wait for them.
  void EndWatches();

 private:
  class WatchCall;
  struct Watch {
    std::shared_ptr<WatchCall> call;
    bool known = false;  // It asks for the server, and not for an unknown service.
  };
  // RESOURCE_EXHAUSTED past their limit.
  absl::Status AddWatch(const std::shared_ptr<WatchCall>& call, const std::string& service);
  void RemoveWatch(const WatchCall* call);

  bool serves() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return serving_ && room_; }
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;  // It is locked before those of calls.
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool room_ ABSL_GUARDED_BY(mutex_) = true;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Watch> watches_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ps
