#include "server/services.h"

#include <deque>

#include "common/grpc_status.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kWaitDefault(10);
constexpr std::chrono::seconds kWaitMax(300);
constexpr size_t kMaxQueuedUpdates = 4096;  // To one shard; it reads far faster than steps are made.

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// The chief's end of a shard's stream.
class FollowCall final : public grpc::ServerBidiReactor<v1::ShardReport, v1::ChiefUpdate>,
                         public std::enable_shared_from_this<FollowCall> {
 public:
  explicit FollowCall(Chief& chief) : chief_(chief) {}

  void Begin() {
    self_ = shared_from_this();  // gRPC's hold, until OnDone.
    StartRead(&report_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(absl::OkStatus());
    if (report_.has_registration()) {
      if (shard_.has_value()) return End(absl::InvalidArgumentError("the shard is already registered"));
      const absl::Status registered = chief_.RegisterShard(
          report_.registration(), [self = shared_from_this()](const v1::ChiefUpdate& update) { self->Send(update); },
          Now());
      if (!registered.ok()) return End(registered);
      shard_ = report_.registration().shard();
    } else if (!shard_.has_value()) {
      return End(absl::InvalidArgumentError("a shard's first report must register it"));
    } else {
      chief_.OnReport(*shard_, report_, Now());
    }
    report_.Clear();
    MutexLock lock(mutex_);
    if (!ended_) StartRead(&report_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // The read ends too, and with it the call.
    MutexLock lock(mutex_);
    queue_.pop_front();
    if (!ended_ && !queue_.empty()) StartWrite(&queue_.front());
  }

  void OnDone() override {
    if (shard_.has_value()) chief_.OnShardGone(*shard_, Now());
    self_.reset();
  }

 private:
  void Send(const v1::ChiefUpdate& update) {
    bool overflow = false;
    {
      MutexLock lock(mutex_);
      if (ended_) return;
      queue_.push_back(update);
      overflow = queue_.size() > kMaxQueuedUpdates;
      if (queue_.size() == 1) StartWrite(&queue_.front());
    }
    if (overflow) End(absl::ResourceExhaustedError("the shard does not read the chief's updates"));
  }

  void End(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      if (std::exchange(ended_, true)) return;
    }
    Finish(ToGrpc(status));
  }

  Chief& chief_;
  std::shared_ptr<FollowCall> self_;
  v1::ShardReport report_;
  std::optional<uint32_t> shard_;
  Mutex mutex_;
  std::deque<v1::ChiefUpdate> queue_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerUnaryReactor* ChiefService::Heartbeat(grpc::CallbackServerContext* context,
                                                  const v1::HeartbeatRequest* request, v1::HeartbeatReply* reply) {
  absl::StatusOr<v1::HeartbeatReply> answer = chief_.Heartbeat(*request, Now());
  if (answer.ok()) *reply = std::move(*answer);
  return Answer(context, answer.status());
}

grpc::ServerUnaryReactor* ChiefService::Done(grpc::CallbackServerContext* context, const v1::DoneRequest* request,
                                             v1::DoneReply* reply) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const TimePoint now = Now();
  const std::chrono::nanoseconds asked = std::chrono::milliseconds(request->wait_ms());
  const TimePoint deadline = now + (request->wait_ms() == 0 ? std::chrono::nanoseconds(kWaitDefault)
                                                            : std::min(asked, std::chrono::nanoseconds(kWaitMax)));
  chief_.Done(*request, now, deadline, [reactor, reply](absl::StatusOr<v1::DoneReply> answer) {
    if (answer.ok()) *reply = std::move(*answer);
    reactor->Finish(ToGrpc(answer.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* ChiefService::Leave(grpc::CallbackServerContext* context, const v1::LeaveRequest* request,
                                              v1::LeaveReply*) {
  return Answer(context, chief_.Leave(*request, Now()));
}

grpc::ServerUnaryReactor* ChiefService::Status(grpc::CallbackServerContext* context, const v1::StatusRequest*,
                                               v1::StatusReply* reply) {
  *reply = chief_.Status(Now());
  return Answer(context, absl::OkStatus());
}

grpc::ServerBidiReactor<v1::ShardReport, v1::ChiefUpdate>* ChiefService::Follow(grpc::CallbackServerContext*) {
  auto call = std::make_shared<FollowCall>(chief_);
  call->Begin();
  return call.get();
}

grpc::ServerUnaryReactor* ShardService::ShardStatus(grpc::CallbackServerContext* context, const v1::ShardStatusRequest*,
                                                    v1::ShardStatusReply* reply) {
  *reply = exchange_.Status(Now());
  return Answer(context, absl::OkStatus());
}

}  // namespace ps
