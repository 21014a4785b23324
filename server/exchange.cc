#include "server/exchange.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "server/grpc_data_call.h"

namespace ps {
namespace {

// A call that is not served.
class Refused final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Refused(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerGenericBidiReactor* ExchangeService::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const std::optional<DataMethod> method = ParseDataMethod(context->method());
  if (context->method().rfind("/ps.v1.Chief/", 0) == 0) {
    return new Refused(absl::UnimplementedError("this server is not the chief; name the address of server 0"));
  }
  if (!method.has_value()) {
    return new Refused(absl::UnimplementedError(absl::StrCat("unknown method ", context->method())));
  }
  auto call = std::make_shared<GrpcDataCall>(shard_, watch_, limits_.waits, *context, *method);
  if (const absl::Status begun = call->Begin(); !begun.ok()) return new Refused(begun);
  return call.get();
}

v1::ShardStatusReply ExchangeService::Status(TimePoint now) const {
  v1::ShardStatusReply status = shard_.Status(now);
  const size_t open = watch_.open_calls();
  status.set_open_calls(static_cast<uint32_t>(open));
  // The window is let grow for a message that is larger.
  status.set_receive_buffer_bytes_max(open * static_cast<uint64_t>(std::max(kServerWindowBytes, kMaxMessageBytes)));
  return status;
}

}  // namespace ps
