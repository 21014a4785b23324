// One exchange over all shards: a call to each, made again after transient errors.
//
// What follows a failed call is decided by its shard's RetryPolicy; this class carries it out, and keeps what the
// attempts have in common: what may be sent, what has arrived, and the result. It knows no transport (shard_link.h) and
// no clock but the timer's.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/slices.h"
#include "common/sync.h"
#include "common/task_thread.h"
#include "ps/client.h"
#include "worker/client/exchange_request.h"
#include "worker/client/retry_policy.h"
#include "worker/client/timer.h"
#include "worker/link/exchange_slices.h"
#include "worker/link/shard_link.h"

namespace ps {

// What exchanges need of their client. Constant while exchanges run.
struct ExchangeContext {
  SlicePlan plan;
  std::vector<std::unique_ptr<ShardLink>> links;  // By shard.
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  bool exact_versions = false;  // The meaning is that of ModePolicy.exact_versions.
  WireFormat wire;
  std::unique_ptr<PulledWeights> pulled;  // With wire.weights_delta.
  uint64_t generation = 0;
  Patience patience;
  uint64_t spread = 0;  // RetryOptions.
  std::chrono::nanoseconds notice_every{};
  std::function<void(const std::string&)> on_notice;
  // Unless empty: a server has answered that this worker is no member, perhaps because this generation runs there; 0:
  // it does not say. The exchange goes on trying until somebody ends it, who knows why. Never blocks, and does not call
  // the exchange before it returns.
  std::function<void(uint64_t generation)> on_fenced;
  // A gradient is not finite, which ends its exchange. Never blocks, and does not call the exchange either.
  std::function<void()> on_not_finite;
  // Unless empty: a push of so many samples, more than none, was answered. As the one before.
  std::function<void(uint64_t step, uint32_t samples)> on_pushed;
  std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();
  std::unique_ptr<TaskThread> sender;  // Looks at gradients and passes them on; null: whoever says they are ready.
};

// Thread-safe.
class RetryingExchange final : public Exchange, public std::enable_shared_from_this<RetryingExchange> {
 public:
  // The timer must outlive the exchange's end, and whatever was asked of it.
  RetryingExchange(std::shared_ptr<const ExchangeContext> context, Timer& timer, ExchangeRequest request,
                   Client::DoneCallback callback);

  // INVALID_ARGUMENT, naming rank, step and tensor, if the request does not fit the model or the shards. Such an
  // exchange is to be aborted, not begun.
  absl::Status CheckRequest() const;
  // Once. Makes no call if the exchange was aborted before.
  void Begin();
  void TensorReady(size_t tensor) override { TensorReady(tensor, {}, nullptr); }
  void TensorReadyFinite(size_t tensor) override { BeginSending(tensor, {}, nullptr, /*finite=*/true); }
  void TensorReady(size_t tensor, std::span<const float> gradient, std::function<void()> release) override {
    BeginSending(tensor, gradient, std::move(release), /*finite=*/false);
  }
  void TensorAbsent(size_t tensor) override;
  bool SetSamples(uint32_t samples) override;
  absl::Status WaitTensor(size_t tensor) override { return *WaitTensorFor(tensor, absl::InfiniteDuration()); }
  std::optional<absl::Status> WaitTensorFor(size_t tensor, absl::Duration time) override;
  absl::StatusOr<ExchangeResult> Wait() override { return *WaitUntil(TimePoint::max()); }
  std::optional<absl::StatusOr<ExchangeResult>> WaitFor(absl::Duration time) override;
  // Cancels calls that made no progress for too long; they are retried if possible. To be called about every second.
  void CheckProgress();
  // Ends it with this status, also between two attempts. Nothing happens if it has ended.
  void Abort(const absl::Status& status);

 private:
  struct ShardState {
    RetryPolicy retry;
    std::shared_ptr<ShardCall> call = nullptr;       // Null before the first, between two attempts, and at the end.
    bool stalled = false;                            // `call` was cancelled because it made no progress,
    bool outdated = false;                           // or because the push has become another.
    std::optional<uint64_t> version = {};            // If exact: the one that all attempts bring; unset: not known yet.
    std::optional<ShardReply> reply = std::nullopt;  // The reply of the attempt that succeeded.
  };

  // A retry brings the same version, so slices that have arrived are final.
  bool exact() const {
    return request_.kind == CallKind::kPushPull ? context_->exact_versions : request_.version.has_value();
  }
  // Whether the exchange has to do with this tensor at all (PushInfo::tensors).
  bool Carries(size_t tensor) const { return carried_.empty() || carried_[tensor]; }
  std::string Where(uint32_t shard) const;
  std::string Who() const;  // The rank, and of a push the step.

  std::optional<absl::StatusOr<ExchangeResult>> WaitUntil(TimePoint end);
  // Takes replies on this thread until `over` or `end`, where there is one link and it can. False: it cannot, or
  // another thread does.
  bool TakeReplies(const std::function<bool()>& over, TimePoint end);
  // Something has changed that a taker may wait for.
  void WakeTaker();

  // What the shards are asked, now that it is known what has become of the push.
  CallKind Kind() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PullsOnly() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !SendsSlices(Kind()); }
  void StartCall(uint32_t shard);
  CallRequest MakeCallRequest(uint32_t shard, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tensor's slices are to be sent. False: no, or no more.
  bool BeginTensor(size_t tensor, std::span<const float> gradient);
  // Has the tensor sent, by whoever does that. `finite`: it is known to be.
  void BeginSending(size_t tensor, std::span<const float> gradient, std::function<void()> release, bool finite);
  // Looks at the slices and sends them.
  void SendTensor(size_t tensor, bool finite);
  // Whether a slice is finite, if that is not known; if so, it is copied to where it is to be sent from, where that is
  // elsewhere.
  bool LookAt(size_t tensor, uint32_t slice, bool finite) const;
  // The same of one that the caller has rounded.
  bool LookAtRounded(const SliceInfo& slice, bool finite) const;
  // What is sent of the tensor is made by EncodeSlice, or by the caller.
  bool Encodes(size_t tensor) const {
    return request_.encoded && context_->plan.layout()[tensor].kind == TensorKind::kWeight;
  }
  // The push counts on this shard: what it has left of its slices there is kept.
  void CommitResiduals(uint32_t shard) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseLater(const std::function<void()>& release);
  // Finite slices of a tensor may be sent.
  void SlicesReady(std::span<const uint32_t> slices, bool last_of_tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnNotFinite(size_t tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing is missing any more. Returns whether the push has become another than servers were told of: then they are
  // told anew.
  bool OnAllReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotFinite(size_t tensor) const;
  std::string TooLarge(size_t tensor) const;  // The error for a value that is not finite once it is rounded.
  bool WantsSlice(uint32_t slice);
  void OnSlice(uint32_t slice);

  void OnCallEnd(uint32_t shard, const absl::Status& status, const ShardReply& reply);
  void OnAnswer(uint32_t shard, const ShardReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns what the user is to be told, if anything.
  std::string OnFailure(uint32_t shard, const absl::Status& ended_with, const ShardReply& reply)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckReply(uint32_t shard, const ShardReply& reply) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // INTERNAL if an exact exchange was sent another version than was asked for, or than in an earlier attempt.
  absl::Status KeepVersion(uint32_t shard, const ShardReply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a call to it at this time. False: it has ended instead.
  bool AskAgain(uint32_t shard, TimePoint when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The error of an exchange that a failed call ends.
  absl::Status EndStatus(uint32_t shard, const RetryDecision& decision, const absl::Status& status) const;

  ExchangeResult MakeResult() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TryHoldMemory();  // False: it has finished.
  void ReleaseMemory();
  void MaybeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(end_mutex_);

  const std::shared_ptr<const ExchangeContext> context_;
  Timer& timer_;
  const ExchangeRequest request_;
  // A tensor's are set before it is ready, and then constant.
  ConstTensors out_;
  std::vector<uint8_t> absent_;  // Unless 0, there is no gradient of it.
  // The tensors that a partial push carries, and their slices; both are empty if it carries all.
  const std::vector<bool> carried_;
  const SliceRanges carries_;
  const std::vector<std::vector<uint32_t>> tensor_slices_;
  const bool servers_look_;                  // Nobody need look here whether gradients are finite.
  std::atomic<std::thread::id> taker_ = {};  // The thread in TakeReplies; none: nobody is.

  Mutex mutex_;
  CondVar changed_;
  std::vector<ShardState> shards_ ABSL_GUARDED_BY(mutex_);
  ReadySlices ready_ ABSL_GUARDED_BY(mutex_);
  uint32_t samples_ ABSL_GUARDED_BY(mutex_);                  // The push's samples, when all are ready,
  uint32_t told_samples_ ABSL_GUARDED_BY(mutex_);             // and the samples that servers are told.
  std::optional<size_t> not_finite_ ABSL_GUARDED_BY(mutex_);  // A tensor for which the push became an empty one.
  bool told_slices_ ABSL_GUARDED_BY(mutex_) = false;          // Servers may know of some.
  bool anew_ ABSL_GUARDED_BY(mutex_) = false;                 // Servers are told of it a second time, as of another.
  std::optional<TimePoint> all_ready_at_ ABSL_GUARDED_BY(mutex_);
  std::optional<ArrivedSlices> arrived_ ABSL_GUARDED_BY(mutex_);  // If exact.
  bool decided_ ABSL_GUARDED_BY(mutex_) = false;                  // The result is fixed, and no call begins any more.

  // A lock of its own, because a link may release memory during a call into it, which is made under mutex_.
  // Lock order: mutex_, then this one.
  Mutex end_mutex_;
  CondVar ended_;
  uint32_t memory_users_ ABSL_GUARDED_BY(end_mutex_) = 1;  // Calls that may use the caller's memory, and Begin.
  std::optional<absl::StatusOr<ExchangeResult>> result_ ABSL_GUARDED_BY(end_mutex_);
  Client::DoneCallback callback_ ABSL_GUARDED_BY(end_mutex_);
  std::vector<std::function<void()>> releases_ ABSL_GUARDED_BY(end_mutex_);  // To be called when it has finished.
  bool finished_ ABSL_GUARDED_BY(end_mutex_) = false;  // There is a result, and nobody uses the memory.
};

}  // namespace ps
