#include "worker/link/pulled_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>
#include "absl/strings/str_cat.h"
#include "common/grpc_call.h"
#include "common/optimizers/optimizer.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/link/pull_weights.h"

namespace ps {

absl::Status StateAssembly::Add(uint32_t shard, const v1::PullStateReply& reply) {
  for (const v1::StateSlice& slice : reply.slices()) PS_RETURN_IF_ERROR(Add(shard, slice));
  return absl::OkStatus();
}

absl::Status StateAssembly::Add(uint32_t shard, const v1::StateSlice& slice) {
  const auto& all = plan_.slices();
  if (slice.index() >= all.size() || all[slice.index()].shard != shard || !IsStateful(all[slice.index()])) {
    return Internal("it sent state of slice ", slice.index(), ", which is no slice of a weight of this shard");
  }
  const SliceInfo& info = all[slice.index()];
  if (has_[slice.index()].has_value()) return Internal("it sent the state of slice ", slice.index(), " twice");
  if (!tensors_.has_value()) tensors_ = slice.tensors_size();
  if (slice.tensors_size() != *tensors_ || *tensors_ > kMaxStateTensors) {
    return Internal("it sent ", slice.tensors_size(), " tensors of state of slice ", slice.index());
  }
  OptimizerState::Tensor& tensor = state_.tensors[info.tensor];
  try {
    tensor.values.resize(static_cast<size_t>(*tensors_));
    for (int k = 0; k < *tensors_; ++k) {
      const std::string& bytes = slice.tensors(k);
      if (bytes.size() != static_cast<size_t>(info.bytes())) {
        return Internal("it sent ", bytes.size(), " bytes of state of slice ", slice.index(), ", and not ",
                        info.bytes());
      }
      std::vector<float>& values = tensor.values[static_cast<size_t>(k)];
      values.resize(static_cast<size_t>(plan_.layout()[info.tensor].elements()));
      std::memcpy(values.data() + info.offset, bytes.data(), bytes.size());
    }
  } catch (const std::bad_alloc&) {
    return FailedPrecondition("no memory for the state of tensor ", ToString(plan_.layout()[info.tensor]));
  }
  has_[slice.index()] = slice.updates();
  return absl::OkStatus();
}

void StateAssembly::Forget(uint32_t shard) {
  for (const uint32_t slice : plan_.shard_slices(shard)) has_[slice].reset();
}

absl::Status StateAssembly::CheckComplete(uint32_t shard) const {
  for (const uint32_t slice : plan_.shard_slices(shard)) {
    if (IsStateful(plan_.slices()[slice]) && !has_[slice].has_value()) {
      return Internal("it sent no state of slice ", slice);
    }
  }
  return absl::OkStatus();
}

OptimizerState StateAssembly::Take() {
  std::vector<bool> begun(state_.tensors.size());
  for (const SliceInfo& slice : plan_.slices()) {
    if (!has_[slice.index].has_value()) continue;
    uint64_t& updates = state_.tensors[slice.tensor].updates;
    updates = begun[slice.tensor] ? std::min(updates, *has_[slice.index]) : *has_[slice.index];
    begun[slice.tensor] = true;
  }
  return std::move(state_);
}

namespace {

constexpr std::chrono::milliseconds kWaitForState(1000);  // That is still to come; then the job may be at rest.
constexpr std::chrono::milliseconds kStatePause(50);
constexpr std::chrono::milliseconds kStateLook(100);  // Whether the shards still send.
constexpr std::chrono::hours kWholeState(24);
constexpr uint64_t kMostStatesAhead = 1 << 16;

// What came of a shard that was asked.
struct Asked {
  absl::Status status;
  uint64_t version = 0;
};

// One call to each of some shards, all under way at the same time.
class StateRound {
 public:
  StateRound(const StateJob& job, StateAssembly& assembly, TimePoint& heard)
      : job_(job), assembly_(assembly), heard_(heard) {}

  std::vector<Asked> Ask(const std::vector<uint32_t>& shards, const v1::PullStateRequest& request,
                         const StatePatience& patience, const std::stop_token& stop) {
    for (const uint32_t shard : shards) reads_.push_back(std::make_unique<Read>(*this, shard, request));
    {
      const MutexLock lock(mutex_);
      open_ = reads_.size();
    }
    for (const auto& read : reads_) read->Begin();
    const std::stop_callback cancel(stop, [this] { CancelAll(); });
    Await(patience);
    std::vector<Asked> asked;
    const MutexLock lock(mutex_);
    for (const auto& read : reads_) {
      absl::Status status = read->problem.ok() ? FromServer(read->status, read->cancelled) : read->problem;
      if (absl::IsCancelled(status)) status = absl::DeadlineExceededError("no answer (timed out)");
      asked.push_back({.status = status, .version = read->reply.version()});
      if (status.ok()) asked.back().status = assembly_.CheckComplete(read->shard);
      if (!asked.back().status.ok()) assembly_.Forget(read->shard);
    }
    return asked;
  }

 private:
  struct Read final : grpc::ClientReadReactor<v1::PullStateReply> {
    Read(StateRound& its_round, uint32_t its_shard, const v1::PullStateRequest& its_request)
        : round(its_round), shard(its_shard), request(its_request) {}

    void Begin() {
      SetDeadline(context, kWholeState);
      stub = v1::Shard::NewStub(round.job_.channels[shard]);
      stub->async()->PullState(&context, &request, this);
      StartRead(&incoming);
      StartCall();
    }
    void Cancel() {
      cancelled = true;
      context.TryCancel();
    }
    void OnReadDone(bool ok) override {
      if (!ok) return;
      reply.set_version(incoming.version());
      if (problem.ok()) problem = round.Take(shard, incoming);
      if (!problem.ok()) context.TryCancel();
      StartRead(&incoming);
    }
    void OnDone(const grpc::Status& ended) override {
      status = ended;
      round.End();  // Nothing of this is there any more after it.
    }

    StateRound& round;
    const uint32_t shard;
    const v1::PullStateRequest request;
    grpc::ClientContext context;
    std::unique_ptr<v1::Shard::Stub> stub;
    v1::PullStateReply incoming;
    v1::PullStateReply reply;  // Its version only.
    absl::Status problem;      // With what came.
    grpc::Status status;
    std::atomic<bool> cancelled = false;
  };

  absl::Status Take(uint32_t shard, const v1::PullStateReply& reply) {
    const MutexLock lock(mutex_);
    heard_ = Now();
    return assembly_.Add(shard, reply);
  }
  void End() {
    const MutexLock lock(mutex_);
    --open_;
    changed_.NotifyAll();
  }
  void CancelAll() {
    for (const auto& read : reads_) read->Cancel();
  }
  // Until all have ended, which they do soon once they are cancelled.
  void Await(const StatePatience& patience) {
    for (bool cancelled = false;;) {
      bool late = false;
      {
        const MutexLock lock(mutex_);
        if (open_ == 0) return;
        changed_.WaitUntil(mutex_, Now() + kStateLook);
        if (open_ == 0) return;
        late = Now() - heard_ > patience.silence + kWaitForState || Now() > patience.give_up;
      }
      if (late && !std::exchange(cancelled, true)) CancelAll();
    }
  }

  const StateJob& job_;
  StateAssembly& assembly_ ABSL_GUARDED_BY(mutex_);
  TimePoint& heard_ ABSL_GUARDED_BY(mutex_);
  Mutex mutex_;
  CondVar changed_;
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<Read>> reads_;  // Last: their calls have ended before.
};

std::vector<uint32_t> AllShards(const StateJob& job) {
  std::vector<uint32_t> shards(job.channels.size());
  for (uint32_t shard = 0; shard < shards.size(); ++shard) shards[shard] = shard;
  return shards;
}

}  // namespace

absl::StatusOr<OptimizerState> PullState(const StateJob& job, std::optional<uint64_t> version,
                                         const StatePatience& patience, const std::stop_token& stop) {
  const bool chooses = job.one_version && !version.has_value();  // One that all have.
  bool exactly = version.has_value();                            // A version that was named, or is to come.
  uint64_t wanted = version.value_or(0);
  std::vector<uint64_t> versions(job.channels.size());
  std::vector<uint32_t> missing = AllShards(job);
  auto assembly = std::make_unique<StateAssembly>(*job.plan);
  TimePoint heard = Now();
  absl::Status problem = absl::DeadlineExceededError("no time was given");
  for (uint64_t ahead = 1; Now() - heard <= patience.silence && Now() <= patience.give_up;) {
    if (stop.stop_requested()) break;
    v1::PullStateRequest request;
    *request.mutable_id() = job.id;
    request.set_wait_ms(static_cast<uint32_t>(kWaitForState.count()));
    if (exactly) request.set_version(wanted);
    const std::vector<Asked> asked = StateRound(job, *assembly, heard).Ask(missing, request, patience, stop);
    std::vector<uint32_t> again;
    bool past = false;
    for (size_t i = 0; i < asked.size(); ++i) {
      versions[missing[i]] = asked[i].version;
      if (asked[i].status.ok()) continue;
      again.push_back(missing[i]);
      const absl::Status& status = asked[i].status;
      problem = Annotate(
          absl::Status(status.code(), absl::IsUnavailable(status) ? ConnectionProblem(status) : Message(status)),
          absl::StrCat("the optimizer's state of shard ", missing[i]));
      // Others are reading it, so it is not that the server is silent.
      if (absl::IsResourceExhausted(status)) heard = Now();
      const bool chosen_is_past = chooses && exactly && absl::IsFailedPrecondition(status);
      past = past || chosen_is_past;
      if (!chosen_is_past && !IsTransient(status)) return problem;
    }
    if (stop.stop_requested()) break;
    if (again.empty()) {
      const auto [lowest, newest] = std::minmax_element(versions.begin(), versions.end());
      if (!chooses || *lowest == *newest) return assembly->Take();
      problem = Unavailable("the optimizer's state: the shards are at different versions: ", *lowest, " to ", *newest);
      wanted = *newest + ahead;
      exactly = true;
    } else if (chooses && exactly) {
      // It is past: further ahead next time. Or it did not come: the job is slower than was thought, or at rest.
      ahead = past ? std::min(2 * ahead, kMostStatesAhead) : 1;
      exactly = false;
    } else {
      missing = std::move(again);
      PauseUntil(Now() + kStatePause, stop);
      continue;
    }
    missing = AllShards(job);
    assembly = std::make_unique<StateAssembly>(*job.plan);
  }
  if (stop.stop_requested()) return absl::CancelledError("the optimizer's state: stopped");
  return problem;
}

}  // namespace ps
