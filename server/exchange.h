// The data calls of service Shard (Init, Push, Pull, PushPull, HashSlices), on raw bytes: payloads are neither copied
// nor parsed by generated code, and a request's size is looked at before it is parsed. One reactor (ExchangeCall)
// serves all five.
#pragma once

#include "server/call_router.h"
#include "server/shard.h"

namespace ps {

struct ExchangeLimits {
  // How long a call may be parked where it names no time of its own, and the most that it may name.
  std::chrono::nanoseconds wait_default = std::chrono::seconds(30);
  std::chrono::nanoseconds wait_max = std::chrono::minutes(5);
};

class ExchangeService {
 public:
  // Takes its calls from the router. All outlive the gRPC server.
  ExchangeService(Shard& shard, CallRouter& router, const ExchangeLimits& limits);

  // Cancels calls that do not move on.
  void Tick(TimePoint now) {
    router_.Tick(now, [this] { return shard_.MemberIncarnations(); });
  }

  // The shard at a glance, with the calls that are open.
  v1::ShardStatusReply Status(TimePoint now) const;

 private:
  Shard& shard_;
  CallRouter& router_;
  const ExchangeLimits limits_;
};

}  // namespace ps
