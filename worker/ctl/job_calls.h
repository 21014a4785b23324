// ps_ctl's calls to the servers of a job.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ps/v1/ps.grpc.pb.h"
#include "ps/v1/ps.pb.h"

namespace ps {

// Calls to the chief are tried again until the timeout while it cannot be reached; the problem is said on stderr at
// once and every few seconds. Errors name whom the call was for. Used by one thread.
class JobCalls {
 public:
  JobCalls(std::string server, absl::Duration timeout) : server_(std::move(server)), timeout_(timeout) {}

  absl::StatusOr<v1::StatusReply> Status(bool layout = false);
  // Waits at the chief for a change that is under way, and is answered a little before the timeout.
  absl::StatusOr<v1::SetHyperparametersReply> Set(const v1::SetHyperparametersRequest& request);
  // Waits at the chief for a checkpoint, and is answered a little before the timeout.
  absl::StatusOr<v1::CheckpointReply> Checkpoint();
  absl::StatusOr<v1::DrainReply> Drain(const std::string& worker);
  absl::StatusOr<v1::ShutdownReply> Shutdown();
  absl::StatusOr<v1::ShardStatusReply> ShardStatus(const v1::ShardInfo& shard);
  // What gRPC's health service says of the server that was named, which need not be a chief. Tried once.
  absl::StatusOr<std::string> Health();

  std::string ShardAddress(const v1::ShardInfo& shard) const { return shard.shard() == 0 ? server_ : shard.address(); }
  std::shared_ptr<grpc::Channel> ShardChannel(const v1::ShardInfo& shard) const;

 private:
  template <typename Request, typename Reply>
  using ChiefCall = grpc::Status (v1::Chief::Stub::*)(grpc::ClientContext*, const Request&, Reply*);
  // A request that says how long it waits is told the time that is left.
  template <typename Request, typename Reply>
  absl::StatusOr<Reply> AskChief(ChiefCall<Request, Reply> call, Request request);

  const std::string server_;
  const absl::Duration timeout_;
};

}  // namespace ps
