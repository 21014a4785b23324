#include "worker/link/pull_weights.h"

#include <algorithm>
#include <utility>

#include <grpcpp/client_context.h>
#include "absl/strings/str_cat.h"
#include "common/grpc_call.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/link/grpc_shard_link.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kPullWait(1000);  // That is still to come; then the job may be at rest.
constexpr std::chrono::milliseconds kPullPause(50);
constexpr std::chrono::milliseconds kLook(100);  // Whether the shards still send.
constexpr std::chrono::hours kWholePull(24);
constexpr uint64_t kMostPulledAhead = 1 << 16;

absl::Status ShardProblem(const ServedModel& model, size_t shard, const absl::Status& status) {
  return {status.code(),
          absl::StrCat("shard ", shard, " at ", model.shards[shard].address, ": ", ConnectionProblem(status))};
}

// One pull from each shard, all under way at the same time.
class Round {
 public:
  Round(const ServedModel& model, const SlicePlan& plan, const MutableTensors& weights)
      : model_(model),
        plan_(plan),
        weights_(weights),
        open_(model.shards.size()),
        ended_(model.shards.size()),
        replies_(model.shards.size()) {}

  // The versions; or the first error, with which all others are cancelled.
  absl::StatusOr<std::vector<uint64_t>> Pull(std::optional<uint64_t> version, std::chrono::milliseconds wait,
                                             std::chrono::nanoseconds silence, const std::stop_token& stop) {
    MakeCalls(version, wait);
    for (const auto& call : calls_) call->Begin();
    Await(wait + silence, stop);
    std::vector<uint64_t> versions;
    const MutexLock lock(mutex_);
    if (!problem_.ok()) return problem_;
    for (size_t shard = 0; shard < replies_.size(); ++shard) {
      const size_t expected = plan_.shard_slices(static_cast<uint32_t>(shard)).size();
      if (replies_[shard].slices != expected) {
        return ShardProblem(model_, shard, Internal("it sent ", replies_[shard].slices, " slices, and not ", expected));
      }
      versions.push_back(replies_[shard].version);
    }
    return versions;
  }

 private:
  void MakeCalls(std::optional<uint64_t> version, std::chrono::milliseconds wait) {
    for (uint32_t shard = 0; shard < model_.shards.size(); ++shard) {
      const ServedModel::Server& server = model_.shards[shard];
      links_.push_back(MakeGrpcShardLink(server.channel, server.address, shard, plan_, {}));
      CallRequest request = {.kind = CallKind::kPull, .exact_version = version, .wait = wait, .timeout = kWholePull};
      request.in = &weights_;
      request.float32 = true;
      calls_.push_back(links_.back()->MakeCall(
          request, [this, shard](const absl::Status& status, const ShardReply& reply) { End(shard, status, reply); }));
    }
  }

  void End(uint32_t shard, const absl::Status& status, const ShardReply& reply) {
    const MutexLock lock(mutex_);
    replies_[shard] = reply;
    ended_[shard] = true;
    --open_;
    if (!status.ok()) Fail(shard, status);
    changed_.NotifyAll();
  }

  // Until all have ended, which they do soon once one has failed.
  void Await(std::chrono::nanoseconds silence, const std::stop_token& stop) {
    for (bool cancelled = false; AnyOpen();) {
      const bool failed = AnyFailed(silence) || stop.stop_requested();
      if (!failed || std::exchange(cancelled, true)) continue;
      for (const auto& call : calls_) call->Cancel();
    }
  }

  // After a while, or a call's end.
  bool AnyOpen() {
    const MutexLock lock(mutex_);
    if (open_ > 0) changed_.WaitUntil(mutex_, Now() + kLook);
    return open_ > 0;
  }

  // One that has been silent for so long has failed, too.
  bool AnyFailed(std::chrono::nanoseconds silence) {
    const MutexLock lock(mutex_);
    for (size_t shard = 0; shard < calls_.size(); ++shard) {
      const bool silent = !ended_[shard] && Now() - calls_[shard]->moved_at() > silence;
      if (silent) Fail(shard, absl::DeadlineExceededError("no answer (timed out)"));
    }
    return !problem_.ok();
  }

  void Fail(size_t shard, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    problem_.Update(ShardProblem(model_, shard, status));
  }

  const ServedModel& model_;
  const SlicePlan& plan_;
  const MutableTensors& weights_;
  std::vector<std::unique_ptr<ShardLink>> links_;
  std::vector<std::shared_ptr<ShardCall>> calls_;

  Mutex mutex_;
  CondVar changed_;
  size_t open_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> ended_ ABSL_GUARDED_BY(mutex_);  // By shard.
  std::vector<ShardReply> replies_ ABSL_GUARDED_BY(mutex_);
  absl::Status problem_ ABSL_GUARDED_BY(mutex_);  // The first.
};

// The highest that any shard is at.
absl::StatusOr<uint64_t> NewestVersion(const ServedModel& model, std::chrono::nanoseconds timeout,
                                       const std::stop_token& stop) {
  uint64_t newest = 0;
  for (size_t shard = 0; shard < model.shards.size(); ++shard) {
    grpc::ClientContext context;
    SetDeadline(context, timeout);
    v1::ShardStatusReply reply;
    const auto stub = v1::Shard::NewStub(model.shards[shard].channel);
    const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
    const absl::Status status = FromGrpc(stub->ShardStatus(&context, v1::ShardStatusRequest(), &reply));
    if (!status.ok()) return ShardProblem(model, shard, status);
    newest = std::max(newest, reply.version());
  }
  return newest;
}

}  // namespace

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status) || absl::IsDeadlineExceeded(status);
}

absl::StatusOr<std::vector<uint64_t>> PullWeights(const ServedModel& model, const SlicePlan& plan,
                                                  std::optional<uint64_t> version, const PullTimes& times,
                                                  const MutableTensors& weights) {
  const bool any = model.one_version && !version.has_value();  // One that all have.
  const TimePoint deadline = Now() + times.timeout;
  for (uint64_t ahead = 0;;) {
    const auto left = std::max<std::chrono::milliseconds>(
        std::chrono::milliseconds(1), std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Now()));
    absl::StatusOr<uint64_t> newest = 0;
    if (any) newest = NewestVersion(model, left, times.stop);
    const std::optional<uint64_t> wanted = any ? std::optional<uint64_t>(newest.value_or(0) + ahead) : version;
    const absl::StatusOr<std::vector<uint64_t>> pulled =
        newest.ok() ? Round(model, plan, weights)
                          .Pull(wanted, any ? std::min(kPullWait, left) : left, times.silence, times.stop)
                    : absl::StatusOr<std::vector<uint64_t>>(newest.status());
    if (times.stop.stop_requested()) return absl::CancelledError("pulling weights: stopped");
    if (pulled.ok()) return pulled;
    // The version is past: further ahead next time. Or it did not come: the job is slower than was thought, or at rest.
    const bool past = any && absl::IsFailedPrecondition(pulled.status());
    if (!past && !IsTransient(pulled.status())) return pulled;
    ahead = past && ahead == 0 ? 1 : past ? std::min(2 * ahead, kMostPulledAhead) : 0;
    if (Now() + kPullPause >= deadline) return pulled;
    PauseUntil(Now() + kPullPause, times.stop);
  }
}

}  // namespace ps
