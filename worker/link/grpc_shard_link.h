// The link to a shard over gRPC: TCP or a Unix socket.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include "common/slices.h"
#include "common/wire_type.h"
#include "ps/v1/ps.pb.h"
#include "worker/link/shard_link.h"

namespace ps {

// The plan must outlive the link; `id` is the member's. `pushes`: how pushes carry weights.
std::unique_ptr<ShardLink> MakeGrpcShardLink(std::shared_ptr<grpc::Channel> channel, std::string address,
                                             uint32_t shard, const SlicePlan& plan, v1::Identity id,
                                             const PushFormat& pushes = {});

}  // namespace ps
