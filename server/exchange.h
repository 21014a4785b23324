// The data calls of service Shard (Init, Push, Pull, PushPull, HashSlices), on raw bytes: payloads are neither copied
// nor parsed by generated code, and a request's size is looked at before it is parsed. One reactor (GrpcDataCall)
// serves all five.
#pragma once

#include "server/call_router.h"
#include "server/push_pull_session.h"
#include "server/shard.h"

namespace ps {

class ExchangeService {
 public:
  // Takes its calls from the router. All outlive the gRPC server.
  ExchangeService(Shard& shard, CallRouter& router, const WaitLimits& limits);

  // Cancels calls that do not move on.
  void Tick(TimePoint now) {
    router_.Tick(now, [this] { return shard_.MemberIncarnations(); });
  }

  // The shard at a glance, with the calls that are open.
  v1::ShardStatusReply Status(TimePoint now) const;

 private:
  Shard& shard_;
  CallRouter& router_;
  const WaitLimits limits_;
};

}  // namespace ps
