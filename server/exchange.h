// The data calls of service Shard (Init, Push, Pull, PushPull, HashSlices), on raw bytes: payloads are neither copied
// nor parsed by generated code, and a request's size is looked at before it is parsed. A generic service takes them, so
// one reactor (GrpcDataCall) serves all five.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include "server/call_watch.h"
#include "server/push_pull_session.h"
#include "server/shard.h"

namespace ps {

struct ExchangeLimits {
  WaitLimits waits;
  CallLimits calls;
};

class ExchangeService final : public grpc::CallbackGenericService {
 public:
  // The shard must outlive the server.
  ExchangeService(Shard& shard, const ExchangeLimits& limits) : shard_(shard), limits_(limits), watch_(limits.calls) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

  // Cancels calls that do not move on.
  void Tick(TimePoint now) {
    watch_.Tick(now, [this] { return shard_.MemberIncarnations(); });
  }

  // The shard at a glance, with the calls that are open.
  v1::ShardStatusReply Status(TimePoint now) const;

 private:
  Shard& shard_;
  const ExchangeLimits limits_;
  CallWatch watch_;
};

}  // namespace ps
