// What a newcomer is told by the chief before it joins.
#include <chrono>
#include <map>
#include <string>

#include "common/clock.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "ps/client.h"
#include "worker/client/chief_calls.h"

namespace ps {
namespace {

// A call that fails sooner was refused: nobody listens there yet.
constexpr std::chrono::seconds kRefusedWithin(1);

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> FlagsOfJob(const ClientOptions& options, bool waits) {
  ChiefCalls chief(MakeChannel(options.server, grpc::InsecureChannelCredentials(), 0), options);
  v1::WorkerFlagsRequest request;
  if (options.rank.has_value()) request.set_rank(*options.rank);
  v1::WorkerFlagsReply reply;
  bool refused = false;
  const auto ask = [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int) {
    const TimePoint asked = Now();
    const absl::Status status = FromGrpc(stub.WorkerFlags(&context, request, &reply));
    refused = !waits && absl::IsUnavailable(status) && Now() - asked < kRefusedWithin;
    return refused ? absl::FailedPreconditionError(status.message()) : status;  // Which is final.
  };
  const absl::Status answered = chief.UntilAnswered(
      {.what = "asking for the job's flags", .call_time = kControlCallTime, .stop = options.stop, .shortens = true},
      ask);
  if (refused) return absl::NotFoundError(Message(answered));
  if (!answered.ok()) return answered;
  std::map<std::string, std::string> flags(reply.flags().begin(), reply.flags().end());
  if (!flags.empty()) flags["job"] = reply.job();
  return flags;
}

}  // namespace ps
