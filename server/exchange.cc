#include "server/exchange.h"

#include <algorithm>

#include "common/endpoint.h"
#include "server/grpc_data_call.h"

namespace ps {

ExchangeService::ExchangeService(Shard& shard, CallRouter& router, const WaitLimits& limits)
    : shard_(shard), router_(router), limits_(limits) {
  for (const char* name : {"Init", "Push", "Pull", "PushPull", "HashSlices"}) {
    const std::string path = std::string("/ps.v1.Shard/") + name;
    router_.Handle(path, [this, method = *ParseDataMethod(path)](const auto& context) {
      return CallRouter::Begun(std::make_shared<GrpcDataCall>(shard_, router_.watch(), limits_, context, method));
    });
  }
}

v1::ShardStatusReply ExchangeService::Status(TimePoint now) const {
  v1::ShardStatusReply status = shard_.Status(now);
  const size_t open = router_.open_calls();
  status.set_open_calls(static_cast<uint32_t>(open));
  // The window is let grow for a message that is larger.
  status.set_receive_buffer_bytes_max(open * static_cast<uint64_t>(std::max(kServerWindowBytes, kMaxMessageBytes)));
  return status;
}

}  // namespace ps
