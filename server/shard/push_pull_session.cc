#include "server/shard/push_pull_session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "common/text.h"
#include "server/config/optimizer_setup.h"

namespace ps {
namespace {

template <typename Request>
std::optional<uint64_t> VersionOf(const Request& request) {
  return request.has_version() ? std::optional<uint64_t>(request.version()) : std::nullopt;
}

bool TellSameGroups(const v1::PushRequest& a, const v1::PushRequest& b) {
  if (a.groups().empty() && b.groups().empty()) return true;
  return a.groups_size() == b.groups_size() && FromProto(a.groups()) == FromProto(b.groups());
}

// All messages of a push have the same of what Describe says.
bool AreOfOnePush(const v1::PushRequest& a, const v1::PushRequest& b) {
  return a.id().rank() == b.id().rank() && a.id().incarnation() == b.id().incarnation() && a.step() == b.step() &&
         a.samples() == b.samples() && a.version() == b.version() && a.contribution() == b.contribution() &&
         a.has_passed() == b.has_passed() && a.passed() == b.passed() &&
         a.has_learning_rate() == b.has_learning_rate() && a.learning_rate() == b.learning_rate() &&
         TellSameGroups(a, b) && a.edition() == b.edition() && CarriesOf(a) == CarriesOf(b);
}

std::string Describe(const v1::PushRequest& push) {
  return absl::StrCat("rank ", push.id().rank(), ", incarnation ", push.id().incarnation(), ", step ", push.step(),
                      ", samples ", push.samples(), ", version ", push.version(), ", contribution ",
                      int{push.contribution()}, push.has_passed() ? absl::StrCat(", passed ", push.passed()) : "",
                      push.has_learning_rate() ? ", learning rate " + ExactText(push.learning_rate()) : "",
                      push.groups_size() > 0 ? ", " + ToString(FromProto(push.groups())) : "",
                      push.edition() > 0 ? absl::StrCat(", edition ", push.edition()) : "",
                      push.carries_size() > 0
                          ? absl::StrCat(", ", push.carries_size(), " ranges of slices from ", push.carries(0).begin(),
                                         " to before ", push.carries(push.carries_size() - 1).end())
                          : "");
}

}  // namespace

std::chrono::nanoseconds PushPullSession::WaitTime(uint32_t wait_ms) const {
  const std::chrono::nanoseconds asked = std::chrono::milliseconds(wait_ms);
  return wait_ms == 0 ? limits_.wait_default : std::min(asked, limits_.wait_max);
}

absl::Status PushPullSession::Add(v1::PushRequest header, std::vector<ReceivedSlice> slices,
                                  std::shared_ptr<ShardClient> client) {
  if (push_.has_value() && !AreOfOnePush(*push_, header)) {
    return InvalidArgument(Describe(*push_), ": the call also carries ", Describe(header));
  }
  push_ = std::move(header);
  if (!opened_ && (push_->stream() || this_host_)) {
    opened_ = true;
    shard_.OpenStream(this, *push_, this_host_, push_->stream() ? std::move(client) : nullptr);
  }
  return shard_.AddSlices(this, *push_, std::move(slices));
}

void PushPullSession::Finish(bool weights, std::shared_ptr<ShardClient> client) {
  if (!push_.has_value()) return client->OnAnswer(absl::InvalidArgumentError("the call ended without a message"));
  Await({.caller = {.id = push_->id(), .peer = peer_},
         .push = push_->step(),
         .weights = weights,
         .computes = weights,
         .wait = WaitTime(push_->wait_ms())},
        /*push_ended=*/push_->calls() <= 1, std::move(client));
}

void PushPullSession::Pull(const v1::PullRequest& request, std::shared_ptr<ShardClient> client) {
  Await({.caller = {.id = request.id(), .peer = peer_},
         .push = {},
         .weights = true,
         .computes = true,
         .version = VersionOf(request),
         .step = request.has_step() ? std::optional<uint64_t>(request.step()) : std::nullopt,
         .wait = WaitTime(request.wait_ms())},
        /*push_ended=*/false, std::move(client));
}

void PushPullSession::PullState(const v1::PullStateRequest& request, std::shared_ptr<ShardClient> client) {
  Await({.caller = {.id = request.id(), .peer = peer_},
         .push = {},
         .state = true,
         .version = VersionOf(request),
         .wait = WaitTime(request.wait_ms())},
        /*push_ended=*/false, std::move(client));
}

void PushPullSession::PullToHash(const v1::HashSlicesRequest& request, std::shared_ptr<ShardClient> client) {
  Await({.caller = {.id = request.id(), .peer = peer_},
         .push = {},
         .weights = true,
         .version = VersionOf(request),
         .wait = WaitTime(request.wait_ms())},
        /*push_ended=*/false, std::move(client));
}

void PushPullSession::Await(const ShardRequest& request, bool push_ended, std::shared_ptr<ShardClient> client) {
  shard_.Await(this, request, push_ended, std::move(client));
  // If Gone came before the shard knew of the request, it is told now.
  if (gone_) shard_.Gone(this);
}

void PushPullSession::Over() {
  if (std::exchange(opened_, false)) shard_.CloseStream(this);
}

void PushPullSession::Gone() {
  gone_ = true;
  shard_.Gone(this);
}

v1::PullReply HeaderOf(const ShardAnswer& answer) {
  v1::PullReply header;
  if (answer.push.has_value()) *header.mutable_push() = *answer.push;
  if (!answer.weights.has_value()) return header;
  header.set_version(answer.weights->version());
  ToProto(answer.hyperparameters, header.mutable_hyperparameters());
  if (answer.schedule.has_value()) *header.mutable_schedule() = ToProto(*answer.schedule);
  header.set_position(answer.position);
  header.set_waited_us(
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(answer.waited).count()));
  return header;
}

}  // namespace ps
