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

template <typename Request, typename Reply>
absl::StatusOr<Reply> JobCalls::AskChief(ChiefCall<Request, Reply> call, Request request) {
  constexpr bool kWaits = requires { request.set_wait_ms(0); };
  const auto stub = v1::Chief::NewStub(ChannelTo(server_));
  const absl::Time deadline = absl::Now() + timeout_;
  for (absl::Time noticed = absl::InfinitePast();;) {
    Reply reply;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    if constexpr (kWaits) request.set_wait_ms(WaitMs(deadline - absl::Now()));
    const absl::Status status = FromGrpc((stub.get()->*call)(&context, request, &reply));
    if (status.ok()) return reply;
    const absl::Status problem = Problem("--server=" + server_, status);
    // A call that waits may also find that the chief has no room for it.
    const bool transient = absl::IsUnavailable(status) || (kWaits && absl::IsResourceExhausted(status));
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
  return AskChief(&v1::Chief::Stub::Status, request);
}

absl::StatusOr<v1::SetHyperparametersReply> JobCalls::Set(const v1::SetHyperparametersRequest& request) {
  return AskChief(&v1::Chief::Stub::SetHyperparameters, request);
}

absl::StatusOr<v1::CheckpointReply> JobCalls::Checkpoint() {
  return AskChief(&v1::Chief::Stub::Checkpoint, v1::CheckpointRequest());
}

absl::StatusOr<v1::DrainReply> JobCalls::Drain(const std::string& worker) {
  v1::DrainRequest request;
  request.set_worker(worker);
  return AskChief(&v1::Chief::Stub::Drain, request);
}

absl::StatusOr<v1::ShutdownReply> JobCalls::Shutdown() {
  return AskChief(&v1::Chief::Stub::Shutdown, v1::ShutdownRequest());
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
