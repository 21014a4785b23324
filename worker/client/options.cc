#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/problems.h"
#include "common/status.h"
#include "common/text.h"
#include "ps/client.h"
#include "worker/client/chief_calls.h"

namespace ps {
namespace {

constexpr size_t kMaxAddressBytes = 1024;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxSettingBytes = 64 << 10;
constexpr uint32_t kMaxRanks = 4096;
constexpr absl::Duration kLongest = absl::Hours(240);

// A call that fails sooner was refused: nobody listens there yet.
constexpr std::chrono::seconds kRefusedWithin(1);

}  // namespace

absl::Status ValidateClientOptions(const ClientOptions& options) {
  Problems problems;
  problems.Check(ParseEndpoint("server", options.server).status());
  // They are sent as protobuf strings.
  problems.Check(CheckText("--server", options.server, kMaxAddressBytes));
  const std::string& memory = options.shared_memory;
  problems.Check(memory == "auto" || memory == "off" || memory == "require", "--shared_memory=", memory,
                 ": expected auto, off or require");
  problems.Check(!options.job.empty(), "--job: expected a name");
  problems.Check(CheckText("--job", options.job, kMaxNameBytes));
  problems.Check(CheckText("--name", options.name, kMaxNameBytes));
  for (const auto& [flag, value] : options.experiment) {
    problems.Check(CheckText("a name in ClientOptions.experiment", flag, kMaxNameBytes));
    problems.Check(CheckText(absl::StrCat("--", flag), value, kMaxSettingBytes));
  }
  for (const auto& [flag, value] : options.flags) {
    problems.Check(CheckText("a name in ClientOptions.flags", flag, kMaxNameBytes));
    problems.Check(CheckText(absl::StrCat("--", flag), value, kMaxSettingBytes));
  }
  if (options.rank.has_value()) problems.CheckRange("rank", *options.rank, 0U, kMaxRanks - 1);
  problems.CheckPositive("connect_timeout", options.connect_timeout, kLongest);
  problems.CheckPositive("start_timeout", options.start_timeout, kLongest);
  problems.CheckRange("rejoin_timeout", options.rejoin_timeout, absl::ZeroDuration(), kLongest);
  // Servers are given waits in milliseconds.
  const absl::Duration notice = options.notice_every;
  problems.Check(notice >= absl::Milliseconds(1) && notice <= kLongest, "notice_every=", absl::FormatDuration(notice),
                 ": expected 1ms to ", absl::FormatDuration(kLongest));
  return problems.ToStatus();
}

ClientOptions RejoinOptions(ClientOptions options, const Client& over) {
  options.name = over.name();
  options.rank = over.rank();
  options.yields = over.fenced() || over.rolled_back();
  Client::KnownCheckpoints known = over.known_checkpoints();
  options.known_dir = std::move(known.dir);
  options.known_generation = known.generation;
  options.known_version = known.version;
  options.rejoin_timeout = std::min(over.server_timeout(), kLongest);
  return options;
}

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
