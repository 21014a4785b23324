// What a newcomer is told by the chief before it joins.
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "ps/client.h"
#include "worker/client/chief_calls.h"

namespace ps {

absl::StatusOr<std::map<std::string, std::string>> FlagsOfJob(const ClientOptions& options, bool waits) {
  ChiefCalls chief(MakeChannel(options.server, grpc::InsecureChannelCredentials(), 0), options);
  v1::WorkerFlagsRequest request;
  if (options.rank.has_value()) request.set_rank(*options.rank);
  v1::WorkerFlagsReply reply;
  const auto ask = [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int) {
    return FromGrpc(stub.WorkerFlags(&context, request, &reply));
  };
  const absl::Status answered =
      waits ? chief.UntilAnswered(
                  {.what = "asking for the job's flags", .call_time = kControlCallTime, .stop = options.stop}, ask)
            : chief.Once(kControlCallTime, ask);
  if (!answered.ok()) return answered;
  std::map<std::string, std::string> flags(reply.flags().begin(), reply.flags().end());
  if (!flags.empty()) flags["job"] = reply.job();
  return flags;
}

}  // namespace ps
