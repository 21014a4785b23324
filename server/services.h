// The control calls: service Chief, and what service Shard has besides the exchange. Thin handlers: decode, delegate,
// finish.
#pragma once

#include "ps/v1/ps.grpc.pb.h"
#include "server/chief.h"
#include "server/exchange.h"

namespace ps {

// The chief must outlive the server.
class ChiefService final : public v1::Chief::CallbackService {
 public:
  explicit ChiefService(Chief& chief) : chief_(chief) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context, const v1::JoinRequest* request,
                                 v1::JoinReply* reply) override;
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context, const v1::HeartbeatRequest* request,
                                      v1::HeartbeatReply* reply) override;
  grpc::ServerWriteReactor<v1::HeartbeatReply>* Watch(grpc::CallbackServerContext* context,
                                                      const v1::WatchRequest* request) override;
  grpc::ServerUnaryReactor* Done(grpc::CallbackServerContext* context, const v1::DoneRequest* request,
                                 v1::DoneReply* reply) override;
  grpc::ServerUnaryReactor* Leave(grpc::CallbackServerContext* context, const v1::LeaveRequest* request,
                                  v1::LeaveReply* reply) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* context, const v1::StatusRequest* request,
                                   v1::StatusReply* reply) override;
  grpc::ServerBidiReactor<v1::ShardReport, v1::ChiefUpdate>* Follow(grpc::CallbackServerContext* context) override;

 private:
  Chief& chief_;
};

// All but ShardStatus are the exchange's, which must outlive the server.
class ShardService final
    : public v1::Shard::WithGenericMethod_Init<v1::Shard::WithGenericMethod_Push<v1::Shard::WithGenericMethod_Pull<
          v1::Shard::WithGenericMethod_PushPull<v1::Shard::WithGenericMethod_HashSlices<
              v1::Shard::WithCallbackMethod_ShardStatus<v1::Shard::Service>>>>>> {
 public:
  explicit ShardService(const ExchangeService& exchange) : exchange_(exchange) {}

  grpc::ServerUnaryReactor* ShardStatus(grpc::CallbackServerContext* context, const v1::ShardStatusRequest* request,
                                        v1::ShardStatusReply* reply) override;

 private:
  const ExchangeService& exchange_;
};

}  // namespace ps
