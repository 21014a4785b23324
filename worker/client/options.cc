#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/problems.h"
#include "common/text.h"
#include "ps/client.h"

namespace ps {
namespace {

constexpr size_t kMaxAddressBytes = 1024;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxSettingBytes = 64 << 10;
constexpr uint32_t kMaxRanks = 4096;
constexpr absl::Duration kLongest = absl::Hours(240);

}  // namespace

absl::Status ValidateClientOptions(const ClientOptions& options) {
  Problems problems;
  problems.Check(ParseEndpoint("server", options.server).status());
  // They are sent as protobuf strings.
  problems.Check(CheckText("--server", options.server, kMaxAddressBytes));
  const std::string& memory = options.shared_memory;
  problems.Check(memory == "auto" || memory == "off" || memory == "require",
                 absl::StrCat("--shared_memory=", memory, ": expected auto, off or require"));
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
  problems.Check(notice >= absl::Milliseconds(1) && notice <= kLongest,
                 absl::StrCat("notice_every=", absl::FormatDuration(notice), ": expected 1ms to ",
                              absl::FormatDuration(kLongest)));
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

}  // namespace ps
