#include "worker/ctl/job_calls.h"

#include <algorithm>
#include <iostream>

#include <grpcpp/client_context.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "common/sync.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "ps/v1/ps.grpc.pb.h"

namespace ps {
namespace {

constexpr absl::Duration kRetry = absl::Milliseconds(200);
constexpr absl::Duration kNoticeEvery = absl::Seconds(3);
constexpr absl::Duration kReplyMargin = absl::Seconds(1);

// A failed call in a line: whom it was for, and what is wrong.
absl::Status Problem(const std::string& server, const absl::Status& status) {
  return {status.code(), absl::StrCat(server, ": ", ConnectionProblem(status))};
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
  return MakeChannel(address, grpc::InsecureChannelCredentials(), 0);
}

// For how long the chief is to wait, of the time that is left.
uint32_t WaitMs(absl::Duration left) {
  const absl::Duration wait = left - std::min(kReplyMargin, left / 3);
  return static_cast<uint32_t>(std::max<int64_t>(1, absl::ToInt64Milliseconds(wait)));
}

}  // namespace

std::shared_ptr<grpc::Channel> JobCalls::ShardChannel(const v1::ShardInfo& shard) const {
  return ChannelTo(ShardAddress(shard));
}

// Also tries again if the call waits for room that the chief does not have. `call` is told the time that is left.
template <typename Reply, typename Call>
absl::StatusOr<Reply> JobCalls::AskChief(bool waits_for_room, Call call) {
  const auto stub = v1::Chief::NewStub(ChannelTo(server_));
  const absl::Time deadline = absl::Now() + timeout_;
  for (absl::Time noticed = absl::InfinitePast();;) {
    Reply reply;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    const absl::Status status = FromGrpc(call(*stub, &context, deadline - absl::Now(), &reply));
    if (status.ok()) return reply;
    const absl::Status problem = Problem("--server=" + server_, status);
    const bool transient = absl::IsUnavailable(status) || (waits_for_room && absl::IsResourceExhausted(status));
    if (!transient || absl::Now() + kRetry >= deadline) return problem;
    if (absl::Now() - noticed >= kNoticeEvery) {
      std::cerr << "ps_ctl: " << Message(problem) << "; retrying\n";
      noticed = absl::Now();
    }
    PauseUntil(Now() + ToChrono(kRetry));
  }
}

absl::StatusOr<v1::StatusReply> JobCalls::Status(bool layout) {
  v1::StatusRequest request;
  request.set_layout(layout);
  return AskChief<v1::StatusReply>(/*waits_for_room=*/false,
                                   [&](auto& stub, auto* context, absl::Duration /*left*/, auto* reply) {
                                     return stub.Status(context, request, reply);
                                   });
}

absl::StatusOr<v1::SetHyperparametersReply> JobCalls::Set(v1::SetHyperparametersRequest request) {
  return AskChief<v1::SetHyperparametersReply>(
      /*waits_for_room=*/true, [&request](auto& stub, auto* context, absl::Duration left, auto* reply) {
        request.set_wait_ms(WaitMs(left));
        return stub.SetHyperparameters(context, request, reply);
      });
}

absl::StatusOr<v1::CheckpointReply> JobCalls::Checkpoint() {
  return AskChief<v1::CheckpointReply>(/*waits_for_room=*/true,
                                       [](auto& stub, auto* context, absl::Duration left, auto* reply) {
                                         v1::CheckpointRequest request;
                                         request.set_wait_ms(WaitMs(left));
                                         return stub.Checkpoint(context, request, reply);
                                       });
}

absl::StatusOr<v1::DrainReply> JobCalls::Drain(const std::string& worker) {
  v1::DrainRequest request;
  request.set_worker(worker);
  return AskChief<v1::DrainReply>(/*waits_for_room=*/false,
                                  [&](auto& stub, auto* context, absl::Duration /*left*/, auto* reply) {
                                    return stub.Drain(context, request, reply);
                                  });
}

absl::StatusOr<v1::ShutdownReply> JobCalls::Shutdown() {
  return AskChief<v1::ShutdownReply>(/*waits_for_room=*/false,
                                     [](auto& stub, auto* context, absl::Duration /*left*/, auto* reply) {
                                       return stub.Shutdown(context, v1::ShutdownRequest(), reply);
                                     });
}

absl::StatusOr<v1::ShardStatusReply> JobCalls::ShardStatus(const v1::ShardInfo& shard) {
  const auto stub = v1::Shard::NewStub(ShardChannel(shard));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  context.set_wait_for_ready(true);
  v1::ShardStatusReply reply;
  const absl::Status status = FromGrpc(stub->ShardStatus(&context, v1::ShardStatusRequest(), &reply));
  if (!status.ok()) return Problem(absl::StrCat("shard ", shard.shard(), " at ", ShardAddress(shard)), status);
  return reply;
}

absl::StatusOr<std::string> JobCalls::Health() {
  namespace health = grpc::health::v1;
  const auto stub = health::Health::NewStub(ChannelTo(server_));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  health::HealthCheckResponse reply;
  const absl::Status status = FromGrpc(stub->Check(&context, health::HealthCheckRequest(), &reply));
  if (!status.ok()) return Problem("--server=" + server_, status);
  return health::HealthCheckResponse::ServingStatus_Name(reply.status());
}

}  // namespace ps
