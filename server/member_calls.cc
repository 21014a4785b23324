// The chief's calls by whose end it notices that the caller is gone: a join that waits for its answer, and the stream
// that a member keeps open.
#include <algorithm>

#include "common/grpc_status.h"
#include "server/services.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kJoinWaitMax(300);
// A join that times out is answered this long before the caller's deadline, at most a third of its time, so that the
// caller learns what was waited for.
constexpr std::chrono::seconds kReplyMargin(1);

TimePoint JoinDeadline(const grpc::CallbackServerContext& context, TimePoint now) {
  const std::chrono::nanoseconds left = context.deadline() - std::chrono::system_clock::now();
  const auto margin = std::min<std::chrono::nanoseconds>(kReplyMargin, left / 3);
  return now + std::min<std::chrono::nanoseconds>(left - margin, kJoinWaitMax);
}

class JoinCall final : public grpc::ServerUnaryReactor, public std::enable_shared_from_this<JoinCall> {
 public:
  explicit JoinCall(Chief& chief) : chief_(chief) {}

  void Begin(const grpc::CallbackServerContext& context, const v1::JoinRequest& request, v1::JoinReply* reply) {
    self_ = shared_from_this();  // gRPC's hold, until OnDone.
    const TimePoint now = Now();
    const TimePoint deadline = JoinDeadline(context, now);
    if (deadline <= now)
      return Finish(ToGrpc(absl::DeadlineExceededError("joining: the call arrived after its deadline")));
    const uint64_t join =
        chief_.Join(request, now, deadline, [self = shared_from_this(), reply](absl::StatusOr<v1::JoinReply> answer) {
          const absl::Status status = answer.status();
          if (status.ok()) *reply = *std::move(answer);
          self->Finish(ToGrpc(status));
        });
    bool cancelled = false;
    {
      MutexLock lock(mutex_);
      join_ = join;
      cancelled = cancelled_;
    }
    if (cancelled) chief_.OnJoinGone(join, Now());
  }

  void OnCancel() override {
    uint64_t join = 0;
    {
      MutexLock lock(mutex_);
      cancelled_ = true;
      join = join_;
    }
    if (join != 0) chief_.OnJoinGone(join, Now());
  }

  void OnDone() override { self_.reset(); }

 private:
  Chief& chief_;
  std::shared_ptr<JoinCall> self_;
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t join_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Only the newest state matters: one that was not written yet is replaced.
class WatchCall final : public grpc::ServerWriteReactor<v1::HeartbeatReply>,
                        public std::enable_shared_from_this<WatchCall> {
 public:
  explicit WatchCall(Chief& chief) : chief_(chief) {}

  void Begin(const v1::WatchRequest& request) {
    self_ = shared_from_this();  // gRPC's hold, until OnDone.
    const absl::StatusOr<uint64_t> watch =
        chief_.Watch(request, Now(), [self = shared_from_this()](const auto& state) { self->Tell(state); });
    if (!watch.ok()) return End(watch.status());
    bool gone = false;
    {
      MutexLock lock(mutex_);
      watch_ = *watch;
      gone = gone_;
    }
    if (gone) chief_.OnWatchGone(*watch, Now());
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return;  // OnCancel comes too.
    MutexLock lock(mutex_);
    writing_ = false;
    WriteNext();
  }

  void OnCancel() override {
    uint64_t watch = 0;
    {
      MutexLock lock(mutex_);
      gone_ = true;
      watch = watch_;
    }
    if (watch != 0) chief_.OnWatchGone(watch, Now());
    End(absl::CancelledError("the caller disconnected"));
  }

  void OnDone() override { self_.reset(); }

 private:
  void Tell(const std::optional<v1::HeartbeatReply>& state) {
    if (!state.has_value()) return End(absl::OkStatus());
    MutexLock lock(mutex_);
    next_ = *state;
    WriteNext();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || ended_ || !next_.has_value()) return;
    writing_ = true;
    outgoing_ = *std::exchange(next_, std::nullopt);
    StartWrite(&outgoing_);
  }

  void End(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      if (std::exchange(ended_, true)) return;
    }
    Finish(ToGrpc(status));
  }

  Chief& chief_;
  std::shared_ptr<WatchCall> self_;
  v1::HeartbeatReply outgoing_;
  Mutex mutex_;
  std::optional<v1::HeartbeatReply> next_ ABSL_GUARDED_BY(mutex_);
  uint64_t watch_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

grpc::ServerUnaryReactor* ChiefService::Join(grpc::CallbackServerContext* context, const v1::JoinRequest* request,
                                             v1::JoinReply* reply) {
  const auto call = std::make_shared<JoinCall>(chief_);
  call->Begin(*context, *request, reply);
  return call.get();
}

grpc::ServerWriteReactor<v1::HeartbeatReply>* ChiefService::Watch(grpc::CallbackServerContext*,
                                                                  const v1::WatchRequest* request) {
  const auto call = std::make_shared<WatchCall>(chief_);
  call->Begin(*request);
  return call.get();
}

}  // namespace ps
