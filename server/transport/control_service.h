// The control calls: service Chief, and what service Shard has besides its data. Thin handlers: decode, delegate,
// finish.
#pragma once

#include <functional>

#include "ps/v1/ps.pb.h"
#include "server/chief/chief.h"
#include "server/transport/call_watch.h"

namespace ps {

// The calls of service Chief. Router and chief outlive the gRPC server.
void HandleChiefCalls(CallRouter& router, Chief& chief);

// ShardStatus, as `status` says it in threads of gRPC.
void HandleShardStatus(CallRouter& router, std::function<v1::ShardStatusReply()> status);

}  // namespace ps
