// One exchange with all shards: a call to each, retried after transient errors.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ps/client.h"
#include "worker/client/shard_call.h"
#include "worker/client/timer.h"

namespace ps {

// What exchanges need of their client. Constant while exchanges run.
struct ExchangeContext {
  SlicePlan plan;
  v1::Identity id;
  std::vector<std::string> addresses;                    // By shard.
  std::vector<std::shared_ptr<grpc::Channel>> channels;  // By shard.
  bool synchronous = false;  // The mode does: a push is answered with exactly one version, whenever it is asked.
  std::chrono::nanoseconds connect_timeout;
  std::chrono::nanoseconds notice_every;
  std::function<void(const std::string&)> on_notice;
};

class ShardExchange final : public Exchange, public std::enable_shared_from_this<ShardExchange> {
 public:
  struct Request {
    ShardCall::Kind kind = ShardCall::Kind::kPull;
    PushInfo push;
    std::optional<uint64_t> version;  // For a pull.
    ConstTensors out;
    MutableTensors in;
    bool deferred = false;
    TimePoint give_up;  // Waits for others end here at the latest.
  };

  // The timer must outlive the exchange's end.
  ShardExchange(std::shared_ptr<const ExchangeContext> context, Timer& timer, Request request,
                Client::DoneCallback callback);

  // INVALID_ARGUMENT if the push names versions for another number of shards.
  absl::Status CheckRequest() const;
  void Begin();
  void TensorReady(size_t tensor) override;
  absl::Status WaitTensor(size_t tensor) override;
  absl::StatusOr<ExchangeResult> Wait() override;
  // A call without progress for too long is cancelled, and retried if possible.
  void CheckProgress(TimePoint now);
  // Ends it with this status. Nothing happens if it has ended.
  void Abort(const absl::Status& status);

 private:
  struct ShardState {
    std::shared_ptr<ShardCall> call;
    int attempts = 0;
    bool ended = false;
    bool stalled = false;                    // `call` was cancelled because it made no progress.
    TimePoint call_ends;                     // Its deadline.
    TimePoint last_contact;                  // When the shard last answered, or bytes moved.
    std::optional<TimePoint> failing_since;  // From then on it did neither.
    ShardReply reply;
  };

  bool sends() const { return request_.kind != ShardCall::Kind::kPull; }
  // A retry brings the same version, so slices that have arrived are final.
  bool exact() const {
    return request_.kind == ShardCall::Kind::kPushPull ? context_->synchronous : request_.version.has_value();
  }
  bool WantsSlice(uint32_t slice);
  void OnSlice(uint32_t slice);
  void StartCall(uint32_t shard);
  // The slice may be sent.
  void SliceReady(const SliceInfo& slice, bool last_of_tensor) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotFinite(size_t tensor) const;
  ShardCall::Request MakeCall(uint32_t shard);
  std::vector<uint32_t> ReadySlices(uint32_t shard) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCallEnd(uint32_t shard, const absl::Status& ended_with, const ShardReply& reply);
  // A call has ended, and nothing refers to its memory any more.
  void OnCallGone();
  // The status that ends the exchange, or OK if the call is to be retried.
  absl::Status ClassifyFailure(ShardState& state, uint32_t shard, const absl::Status& status, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MaybeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(end_mutex_);
  void OpenCall();
  ExchangeResult MakeResult() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Notice(const std::string& text) const {
    if (context_->on_notice) context_->on_notice(text);
  }

  const std::shared_ptr<const ExchangeContext> context_;
  Timer& timer_;
  const Request request_;
  Client::DoneCallback callback_;
  std::vector<std::vector<uint32_t>> tensor_slices_;  // Slices of each tensor.

  Mutex mutex_;
  CondVar changed_;
  std::vector<ShardState> shards_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> ready_ ABSL_GUARDED_BY(mutex_);  // Slices, in the order in which they became ready.
  size_t ready_tensors_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<bool> here_ ABSL_GUARDED_BY(mutex_);              // Slices of the weights that came, if exact.
  std::vector<size_t> missing_slices_ ABSL_GUARDED_BY(mutex_);  // Of each tensor, likewise.
  TimePoint all_ready_at_ ABSL_GUARDED_BY(mutex_);
  bool decided_ ABSL_GUARDED_BY(mutex_) = false;  // The result is fixed.

  // A lock of its own: gRPC may release memory during a call into it, which is made under mutex_.
  // Lock order: mutex_, then this one.
  Mutex end_mutex_;
  CondVar ended_;
  uint32_t open_calls_ ABSL_GUARDED_BY(end_mutex_) =
      1;  // Not gone, or about to begin; they use the memory. Begin is one.
  std::optional<absl::StatusOr<ExchangeResult>> result_ ABSL_GUARDED_BY(end_mutex_);
  bool finished_ ABSL_GUARDED_BY(end_mutex_) = false;  // There is a result, and no call is open.
};

}  // namespace ps
