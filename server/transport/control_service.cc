#include "server/transport/control_service.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/codec.h"
#include "common/endpoint.h"
#include "common/proto_values.h"
#include "common/slices.h"
#include "common/status.h"
#include "server/transport/follower.h"
#include "server/transport/server_call.h"

namespace ps {
namespace {

using Context = grpc::GenericCallbackServerContext;

// A join carries the model's layout; all other requests are small.
constexpr size_t kMaxJoinBytes = kMaxMessageBytes;

// A part of a layout is no larger, so that the time in which one may come, and thus that of a silent caller, is short.
constexpr size_t kMaxLayoutPartBytes = 512 << 10;
// The parts of a layout come at least as fast as this, after a while.
constexpr std::chrono::minutes kLayoutTime(1);
constexpr size_t kLayoutBytesPerSecond = 32 << 10;
constexpr size_t kLeastTensorBytes = 16;  // It takes them beside its name.

constexpr std::chrono::seconds kJoinWaitMax(300);
// A join that times out is answered this long before the caller's deadline, at most a third of its time, so that the
// caller learns what was waited for.
constexpr std::chrono::seconds kReplyMargin(1);

constexpr std::chrono::seconds kTakeRunWaitMax(300);
// The limits of other calls that say how long they wait.
constexpr std::chrono::seconds kWaitDefault(10);
constexpr std::chrono::seconds kWaitMax(300);

TimePoint JoinDeadline(const Context& context, TimePoint now) {
  const std::chrono::nanoseconds left = context.deadline() - std::chrono::system_clock::now();
  const auto margin = std::min<std::chrono::nanoseconds>(kReplyMargin, left / 3);
  return now + std::min<std::chrono::nanoseconds>(left - margin, kJoinWaitMax);
}

TimePoint WaitDeadline(uint32_t wait_ms, TimePoint now) {
  if (wait_ms == 0) return now + kWaitDefault;
  return now + std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(wait_ms), kWaitMax);
}

TimePoint TakeRunDeadline(uint32_t wait_ms, TimePoint now) {
  return now + std::min<std::chrono::nanoseconds>(std::chrono::milliseconds(wait_ms), kTakeRunWaitMax);
}

// Waits for its answer at the chief, which learns if the caller goes away meanwhile.
class JoinCall final : public RequestCall<v1::JoinRequest, ServerCall, kMaxJoinBytes> {
 public:
  JoinCall(CallWatch& watch, const Context& context, Chief& chief) : RequestCall(watch, context), chief_(chief) {}

 private:
  absl::Status OnRequest(const v1::JoinRequest& request) override {
    const TimePoint now = Now();
    const TimePoint deadline = JoinDeadline(context(), now);
    if (deadline <= now) return absl::DeadlineExceededError("joining: the call arrived after its deadline");
    join_ = chief_.Join(request, now, deadline, [self = Self(this)](const auto& reply) { self->AnswerOrEnd(reply); });
    if (join_ != 0) watch().Adopt(this);
    if (gone()) chief_.OnJoinGone(join_, Now());
    return absl::OkStatus();
  }
  void OnGone() override { chief_.OnJoinGone(join_, Now()); }

  Chief& chief_;
  std::atomic<uint64_t> join_ = 0;  // 0: none that waits.
};

// Takes a layout that comes in parts.
class TellLayoutCall final : public ServerCall {
 public:
  TellLayoutCall(CallWatch& watch, const Context& context, Chief& chief) : ServerCall(watch, context), chief_(chief) {}

 private:
  void OnBegin() override { Read(kMaxLayoutPartBytes); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) override {
    v1::LayoutPart part;
    PS_RETURN_IF_ERROR(DecodeMessage(message, &part));
    if (!offers_) {
      if (!IsLayoutHash(part.hash())) {
        return absl::InvalidArgumentError("hash: expected 32 lower-case hexadecimal digits in a layout's first part");
      }
      PS_ASSIGN_OR_RETURN(const bool known, chief_.OfferLayout(part.hash()));
      if (known) {
        Answer(EncodeMessage(v1::TellLayoutReply()));
        return absl::OkStatus();
      }
      hash_ = part.hash();
      offers_ = true;
    }
    // Only what makes the layout longer gives it more time.
    const size_t bytes = names_ + kLeastTensorBytes * layout_->size();
    if (Now() - began_ > kLayoutTime + std::chrono::seconds(bytes / kLayoutBytesPerSecond)) {
      return absl::DeadlineExceededError(
          absl::StrCat("telling the layout: ", layout_->size(), " tensors in ", FormatSeconds(Now() - began_)));
    }
    PS_RETURN_IF_ERROR(CheckTensorTexts(part.tensors()));
    for (const v1::Tensor& tensor : part.tensors()) names_ += tensor.name().size();
    if (layout_->size() + static_cast<size_t>(part.tensors_size()) > kMaxTensors || names_ > kMaxNamesBytes) {
      return InvalidArgument("the model has more than ", kMaxTensors, " tensors, or names of more than ",
                             kMaxNamesBytes, " bytes");
    }
    for (const v1::Tensor& tensor : part.tensors()) layout_->push_back(TensorFromProto(tensor));
    Read(kMaxLayoutPartBytes);
    return absl::OkStatus();
  }
  void OnMessagesEnd() override {
    if (gone() || !offers_) return End(absl::InvalidArgumentError("the call ended without a layout"));
    if (const absl::Status valid = ValidateLayout(*layout_); !valid.ok()) return End(valid);
    if (const std::string found = LayoutHash(*layout_); found != hash_) {
      return End(InvalidArgument("the hash of the layout is ", found, ", and not ", hash_, ", as its first part says"));
    }
    offers_ = false;
    chief_.OnLayout(hash_, std::move(layout_));
    Answer(EncodeMessage(v1::TellLayoutReply()));
  }
  void OnOver() override {
    if (std::exchange(offers_, false)) chief_.OnLayout(hash_, nullptr);
  }

  Chief& chief_;
  const TimePoint began_ = Now();
  // Reactions on messages use these, one at a time, and OnOver after them.
  std::string hash_;
  bool offers_ = false;  // The first part has come, and the chief waits for OnLayout.
  size_t names_ = 0;     // Bytes.
  std::shared_ptr<Layout> layout_ = std::make_shared<Layout>();
};

// The stream that a member keeps open.
class WatchCall final : public StateCall<v1::WatchRequest> {
 public:
  WatchCall(CallWatch& watch, const Context& context, Chief& chief) : StateCall(watch, context), chief_(chief) {}

 private:
  absl::Status OnRequest(const v1::WatchRequest& request) override {
    PS_ASSIGN_OR_RETURN(
        const uint64_t opened,
        chief_.Watch(request, Now(), [self = Self(this)](const std::optional<v1::HeartbeatReply>& state) {
          if (!state.has_value()) return self->End(absl::OkStatus());
          self->Tell(EncodeMessage(*state));
        }));
    opened_ = opened;
    watch().Adopt(this);
    if (gone()) chief_.OnWatchGone(opened_, Now());
    return absl::OkStatus();
  }
  void OnGone() override { chief_.OnWatchGone(opened_, Now()); }
  void OnOver() override { chief_.OnWatchGone(opened_, Now()); }

  Chief& chief_;
  std::atomic<uint64_t> opened_ = 0;  // 0: not yet.
};

// Waits for its answer at the chief, which keeps one a member, or a few, and refuses others at once. `kAsk` asks it,
// with the time up to which it may take.
template <typename Request, auto kAsk, auto kDeadline = WaitDeadline>
class AskCall final : public RequestCall<Request> {
 public:
  AskCall(CallWatch& watch, const Context& context, Chief& chief)
      : RequestCall<Request>(watch, context), chief_(chief) {}

 private:
  absl::Status OnRequest(const Request& request) override {
    this->watch().Adopt(this);
    const TimePoint now = Now();
    std::invoke(kAsk, chief_, request, now, kDeadline(request.wait_ms(), now),
                [self = this->Self(this)](const auto& reply) { self->AnswerOrEnd(reply); });
    return absl::OkStatus();
  }

  Chief& chief_;
};

void AskForCheckpoint(Chief& chief, const v1::CheckpointRequest& /*request*/, TimePoint now, TimePoint deadline,
                      Chief::Callback<v1::CheckpointReply> answer) {
  chief.Checkpoint(now, deadline, std::move(answer));
}

// The chief's end of a shard's stream (Chief.Follow).
//
// Registers the shard with its first report, passes on the others, and sends it the chief's updates, in order. A shard
// that does not read them is cut off.
class FollowCall final : public ServerCall {
 public:
  // The chief outlives the call.
  FollowCall(CallWatch& watch, const Context& context, Chief& chief) : ServerCall(watch, context), chief_(chief) {}

 private:
  void OnBegin() override { Read(kMaxRegistrationBytes); }
  absl::Status OnMessage(const grpc::ByteBuffer& message) override {
    v1::ShardReport report;
    PS_RETURN_IF_ERROR(DecodeMessage(message, &report));
    if (report.has_registration()) {
      PS_RETURN_IF_ERROR(Register(report));
    } else if (!shard_.has_value()) {
      return absl::InvalidArgumentError("a shard's first report must register it");
    } else {
      chief_.OnReport(*shard_, report, Now());
    }
    ReadWhenever(kMaxReportBytes);
    return absl::OkStatus();
  }
  void OnMessagesEnd() override { End(absl::OkStatus()); }
  void OnWritten() override {
    MutexLock lock(mutex_);
    writing_ = false;
    WriteNext();
  }
  void OnOver() override {
    if (shard_.has_value()) chief_.OnShardGone(*shard_, connection_, Now());
  }

  absl::Status Register(const v1::ShardReport& report) {
    if (shard_.has_value()) return absl::InvalidArgumentError("the shard is already registered");
    PS_ASSIGN_OR_RETURN(
        const uint64_t registered,
        chief_.RegisterShard(
            report.registration(), [self = Self(this)](const v1::ChiefUpdate& update) { self->Send(update); }, Now()));
    connection_ = registered;
    shard_ = report.registration().shard();
    watch().Adopt(this);  // The chief takes one a shard.
    return absl::OkStatus();
  }
  void Send(const v1::ChiefUpdate& update) {
    absl::Status added = absl::OkStatus();
    {
      MutexLock lock(mutex_);
      added = queue_.Add(update);
      WriteNext();
    }
    if (!added.ok()) End(added);
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    const std::optional<grpc::ByteBuffer> next = queue_.Take();
    if (!next.has_value()) return;
    writing_ = true;
    Write(*next);
  }

  Chief& chief_;
  // Known once the shard is registered. Both are used by reactions on messages, one at a time.
  std::optional<uint32_t> shard_;
  uint64_t connection_ = 0;
  Mutex mutex_;
  UpdateQueue queue_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

void HandleChiefCalls(CallRouter& router, Chief& chief) {
  router.HandleWith<JoinCall>("/ps.v1.Chief/Join", chief);
  router.HandleWith<TellLayoutCall>("/ps.v1.Chief/TellLayout", chief);
  router.HandleWith<WatchCall>("/ps.v1.Chief/Watch", chief);
  router.HandleWith<AskCall<v1::DoneRequest, &Chief::Done>>("/ps.v1.Chief/Done", chief);
  router.HandleWith<AskCall<v1::SetHyperparametersRequest, &Chief::SetHyperparameters>>(
      "/ps.v1.Chief/SetHyperparameters", chief);
  router.HandleWith<AskCall<v1::CheckpointRequest, AskForCheckpoint>>("/ps.v1.Chief/Checkpoint", chief);
  router.HandleWith<AskCall<v1::TakeRunRequest, &Chief::TakeRun, TakeRunDeadline>>("/ps.v1.Chief/TakeRun", chief);
  router.HandleWith<AskCall<v1::ReduceRequest, &Chief::Reduce>>("/ps.v1.Chief/Reduce", chief);
  router.HandleWith<FollowCall>("/ps.v1.Chief/Follow", chief);
  HandleRequests<v1::HeartbeatRequest, v1::HeartbeatReply>(
      router, "/ps.v1.Chief/Heartbeat",
      [&chief](const v1::HeartbeatRequest& request) { return chief.Heartbeat(request, Now()); });
  HandleRequests<v1::LeaveRequest, v1::LeaveReply>(
      router, "/ps.v1.Chief/Leave", [&chief](const v1::LeaveRequest& request) -> absl::StatusOr<v1::LeaveReply> {
        PS_RETURN_IF_ERROR(chief.Leave(request, Now()));
        return v1::LeaveReply();
      });
  HandleRequests<v1::WorkerFlagsRequest, v1::WorkerFlagsReply>(
      router, "/ps.v1.Chief/WorkerFlags",
      [&chief](const v1::WorkerFlagsRequest& request) { return chief.FlagsFor(request); });
  HandleRequests<v1::DrainRequest, v1::DrainReply>(
      router, "/ps.v1.Chief/Drain", [&chief](const v1::DrainRequest& request) { return chief.Drain(request, Now()); });
  HandleRequests<v1::ShutdownRequest, v1::ShutdownReply>(
      router, "/ps.v1.Chief/Shutdown", [&chief](const v1::ShutdownRequest&) { return chief.ShutDown(Now()); });
  HandleRequests<v1::StatusRequest, v1::StatusReply>(
      router, "/ps.v1.Chief/Status",
      [&chief](const v1::StatusRequest& request) { return chief.Status(Now(), request.layout()); });
}

void HandleShardStatus(CallRouter& router, std::function<v1::ShardStatusReply()> status) {
  HandleRequests<v1::ShardStatusRequest, v1::ShardStatusReply>(
      router, "/ps.v1.Shard/ShardStatus",
      [status = std::move(status)](const v1::ShardStatusRequest&) { return status(); });
}

}  // namespace ps
