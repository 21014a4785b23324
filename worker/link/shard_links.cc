#include "worker/link/shard_links.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/status.h"
#include "worker/link/grpc_shard_link.h"
#include "worker/link/local_shard_link.h"

namespace ps {
namespace {

constexpr absl::Duration kLocalConnect = absl::Seconds(5);

// Makes each call through `local` if that works and what the call sends is shared, else through `remote`.
class PreferredLink final : public ShardLink {
 public:
  PreferredLink(std::unique_ptr<ShardLink> local, std::unique_ptr<ShardLink> remote)
      : local_(std::move(local)), remote_(std::move(remote)) {}

  const std::string& address() const override { return remote_->address(); }
  bool server_looks() const override { return local_->server_looks(); }
  bool can_view() const override { return local_->can_view(); }
  bool TakeReplies(const std::function<bool()>& over, TimePoint deadline) override {
    return local_->TakeReplies(over, deadline);
  }
  void WakeTaker() override { local_->WakeTaker(); }
  std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) override {
    const bool empty = request.kind != CallKind::kInit && request.samples == 0;
    const bool sends_nothing = !SendsSlices(request.kind) || empty;
    const bool through_memory =
        local_->works() && (sends_nothing || (request.shared != nullptr && local_->takes(*request.shared)));
    return (through_memory ? *local_ : *remote_).MakeCall(std::move(request), std::move(on_end));
  }

 private:
  const std::unique_ptr<ShardLink> local_;
  const std::unique_ptr<ShardLink> remote_;
};

// What the links to all shards have in common.
struct Linking {
  const ClientOptions& options;
  const v1::JoinReply& joined;
  const SlicePlan& plan;
  const std::function<absl::Status()>& make_spare;
};

// The link to this shard, and, where it is not through shared memory, why not.
absl::StatusOr<std::unique_ptr<ShardLink>> MakeLink(const Linking& with, uint32_t shard,
                                                    const std::shared_ptr<grpc::Channel>& channel,
                                                    const std::string& address, std::string* why_not) {
  const v1::ShardInfo& info = with.joined.shards(static_cast<int>(shard));
  auto remote =
      MakeGrpcShardLink(channel, address, shard, with.plan, with.joined.id(),
                        {.type = static_cast<WireType>(with.joined.wire_type()), .top_k = with.joined.top_k()});
  if (with.options.shared_memory == "off") {
    *why_not = "--shared_memory=off";
    return remote;
  }
  absl::Status connected = absl::UnavailableError("the server offers none");
  if (!info.local_socket().empty()) connected = with.make_spare();
  if (!info.local_socket().empty() && connected.ok()) {
    const absl::Duration longest = std::min(with.options.connect_timeout, kLocalConnect);
    const auto on_lost = [shard, notice = with.options.on_notice](const std::string& text) {
      if (notice) notice(absl::StrCat("shard ", shard, ": ", text));
    };
    absl::StatusOr<std::unique_ptr<ShardLink>> local = ConnectLocally({.socket = info.local_socket(),
                                                                       .address = address,
                                                                       .shard = shard,
                                                                       .plan = &with.plan,
                                                                       .id = with.joined.id(),
                                                                       .on_lost = on_lost},
                                                                      Now() + ToChrono(longest));
    if (local.ok()) return std::make_unique<PreferredLink>(*std::move(local), std::move(remote));
    // Nobody is there: the server is on another host, or in another network namespace.
    connected =
        absl::IsUnavailable(local.status()) ? absl::UnavailableError("not reachable on this host") : local.status();
  }
  *why_not = Message(connected);
  if (with.options.shared_memory != "require") return remote;
  return FailedPrecondition("--shared_memory=require: shard ", shard, " at ", address, ": ", *why_not);
}

}  // namespace

absl::StatusOr<ShardLinks> LinkShards(const ClientOptions& options, const v1::JoinReply& joined, const SlicePlan& plan,
                                      const std::function<absl::Status()>& make_spare) {
  const Linking with = {.options = options, .joined = joined, .plan = plan, .make_spare = make_spare};
  ShardLinks made;
  std::vector<std::string> over_grpc;
  for (uint32_t shard = 0; shard < static_cast<uint32_t>(joined.shards_size()); ++shard) {
    // The chief is reached as the user said, the others as they advertise.
    const std::string address = shard == 0 ? options.server : joined.shards(static_cast<int>(shard)).address();
    made.channels.push_back(MakeChannel(address, grpc::InsecureChannelCredentials(), 0, options.long_links));
    std::string why_not;
    PS_ASSIGN_OR_RETURN(std::unique_ptr<ShardLink> link,
                        MakeLink(with, shard, made.channels[shard], address, &why_not));
    made.links.push_back(std::move(link));
    if (!why_not.empty()) over_grpc.push_back(absl::StrCat("shard ", shard, " over gRPC (", why_not, ")"));
  }
  made.has_shared_memory = over_grpc.size() < made.links.size();
  made.text = absl::StrJoin(over_grpc, ", ");
  if (made.has_shared_memory) {
    absl::StrAppend(&made.text, made.text.empty() ? "all shards" : "; the others", " through shared memory");
  }
  return made;
}

}  // namespace ps
