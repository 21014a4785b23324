#include "worker/link/weights_hash.h"

#include <algorithm>
#include <optional>

#include <grpcpp/client_context.h>
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/grpc_call.h"
#include "common/hash.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kWaitForVersion(1);  // That is still to come; then the newest may have come to rest.
constexpr std::chrono::milliseconds kRetryPause(20);
constexpr uint64_t kMostAhead = 1 << 16;
constexpr std::chrono::milliseconds kReplyMargin(500);

using Answers = std::vector<absl::StatusOr<v1::HashSlicesReply>>;

// One call to each shard, all under way at the same time.
Answers AskShards(const HashJob& job, std::optional<uint64_t> version, TimePoint deadline,
                  const std::stop_token& stop) {
  struct Call {
    grpc::ClientContext context;
    v1::HashSlicesRequest request;
    v1::HashSlicesReply reply;
    std::unique_ptr<v1::Shard::Stub> stub;
    grpc::Status status;
  };
  const auto left = std::max<std::chrono::nanoseconds>(deadline - Now(), std::chrono::milliseconds(1));
  const auto wait = version.has_value() ? std::min<std::chrono::nanoseconds>(kWaitForVersion, left) : left;
  std::vector<Call> calls(job.channels.size());
  Mutex mutex;
  CondVar ended;
  size_t open = calls.size();
  for (size_t shard = 0; shard < calls.size(); ++shard) {
    Call& call = calls[shard];
    *call.request.mutable_id() = job.id;
    if (version.has_value()) call.request.set_version(*version);
    call.request.set_wait_ms(static_cast<uint32_t>(
        std::max<int64_t>(1, std::chrono::duration_cast<std::chrono::milliseconds>(wait).count())));
    SetDeadline(call.context, wait + kReplyMargin);
    call.stub = v1::Shard::NewStub(job.channels[shard]);
    call.stub->async()->HashSlices(&call.context, &call.request, &call.reply, [&](const grpc::Status& status) {
      MutexLock lock(mutex);
      call.status = status;
      if (--open == 0) ended.NotifyAll();
    });
  }
  {
    const std::stop_callback cancel(stop, [&calls] {
      for (Call& call : calls) call.context.TryCancel();
    });
    MutexLock lock(mutex);
    while (open > 0) ended.Wait(mutex);  // Bounded by the calls' deadlines.
  }
  Answers answers;
  for (Call& call : calls) {
    if (call.status.ok()) {
      answers.emplace_back(std::move(call.reply));
    } else {
      answers.emplace_back(FromServer(call.status, stop.stop_requested()));
    }
  }
  return answers;
}

// The first error that is not transient; else OK, and whether any shard's answer is missing.
absl::Status CheckErrors(const Answers& answers, bool may_be_past, bool* missing, absl::Status* transient) {
  *missing = false;
  for (size_t shard = 0; shard < answers.size(); ++shard) {
    const absl::Status& status = answers[shard].status();
    if (status.ok()) continue;
    *missing = true;
    const absl::Status plain(status.code(), absl::IsUnavailable(status) ? ConnectionProblem(status) : Message(status));
    *transient = Annotate(plain, absl::StrCat("hashing the weights of shard ", shard));
    const bool past = may_be_past && absl::IsFailedPrecondition(status);
    if (!past && !absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) &&
        !absl::IsResourceExhausted(status)) {
      return *transient;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<HashedWeights> Combine(const HashJob& job, const Answers& answers) {
  HashedWeights result;
  std::vector<SliceHash> hashes(job.slices);
  size_t found = 0;
  for (size_t shard = 0; shard < answers.size(); ++shard) {
    result.versions.push_back(answers[shard]->version());
    for (const v1::SliceHash& hash : answers[shard]->hashes()) {
      if (hash.slice() >= hashes.size() || hash.hash().size() != sizeof(SliceHash)) {
        return Internal("shard ", shard, " sent a hash of slice ", hash.slice());
      }
      std::copy(hash.hash().begin(), hash.hash().end(), hashes[hash.slice()].begin());
      ++found;
    }
  }
  if (found != job.slices) return Internal("the shards sent hashes of ", found, " of the ", job.slices, " slices");
  result.hash = WeightsHash(hashes);
  return result;
}

}  // namespace

std::string ToString(const HashedWeights& weights) {
  const auto differs = [&](uint64_t version) { return version != weights.versions[0]; };
  if (std::none_of(weights.versions.begin(), weights.versions.end(), differs)) return weights.hash;
  return absl::StrCat(weights.hash, " (the shards are at versions ", absl::StrJoin(weights.versions, ", "), ")");
}

absl::StatusOr<HashedWeights> HashWeights(const HashJob& job, TimePoint deadline, const std::stop_token& stop) {
  uint64_t version = 0;
  bool exactly = false;  // That version; else the newest.
  absl::Status problem = absl::DeadlineExceededError("no time was given");
  uint64_t ahead = 1;
  while (Now() < deadline) {
    if (stop.stop_requested()) return absl::CancelledError("hashing: stopped");
    const Answers answers = AskShards(job, exactly ? std::optional<uint64_t>(version) : std::nullopt, deadline, stop);
    if (stop.stop_requested()) return absl::CancelledError("hashing: stopped");
    bool missing = false;
    PS_RETURN_IF_ERROR(CheckErrors(answers, exactly, &missing, &problem));
    if (missing) {
      // The version is past: further ahead next time. Or it did not come: the job is slower than was thought, or has
      // come to rest.
      const bool past = std::any_of(answers.begin(), answers.end(),
                                    [](const auto& answer) { return absl::IsFailedPrecondition(answer.status()); });
      if (exactly) ahead = past ? std::min(2 * ahead, kMostAhead) : 1;
      if (!exactly) PauseUntil(Now() + kRetryPause, stop);
      exactly = false;
      continue;
    }
    absl::StatusOr<HashedWeights> combined = Combine(job, answers);
    if (!combined.ok() || !job.one_version) return combined;
    const auto [lowest, newest] = std::minmax_element(combined->versions.begin(), combined->versions.end());
    if (*lowest == *newest) return combined;
    problem = Unavailable("the shards are at different versions: ", absl::StrJoin(combined->versions, ", "));
    version = *newest + ahead;
    exactly = true;
  }
  return absl::Status(absl::IsUnavailable(problem) ? problem.code() : absl::StatusCode::kDeadlineExceeded,
                      Message(problem));
}

}  // namespace ps
