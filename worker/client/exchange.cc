#include "worker/client/exchange.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/connection_problem.h"
#include "common/finite.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kBackoffFirst(20);
constexpr std::chrono::milliseconds kBackoffMost(1000);
constexpr int kNoticeEveryAttempts = 4;
// A call is given its wait at the server, and on top this and the time that its bytes take at the slowest rate: as a
// whole, and for each message.
constexpr std::chrono::seconds kCallMargin(10);
constexpr double kSlowestBytesPerSecond = 32 << 10;
// gRPC ends a call at its deadline no earlier than this before it.
constexpr std::chrono::milliseconds kDeadlineSlack(100);

std::chrono::nanoseconds SlowestTime(double bytes) {
  return std::chrono::nanoseconds(static_cast<int64_t>(bytes / kSlowestBytesPerSecond * 1e9));
}

std::chrono::nanoseconds Backoff(int attempts) {
  return std::min<std::chrono::nanoseconds>(kBackoffFirst * (1 << std::min(attempts, 6)), kBackoffMost);
}

}  // namespace

ShardExchange::ShardExchange(std::shared_ptr<const ExchangeContext> context, Timer& timer, Request request,
                             Client::DoneCallback callback)
    : context_(std::move(context)),
      timer_(timer),
      request_(std::move(request)),
      callback_(std::move(callback)),
      tensor_slices_(context_->plan.layout().size()),
      shards_(context_->plan.num_shards()) {
  for (const SliceInfo& slice : context_->plan.slices()) tensor_slices_[slice.tensor].push_back(slice.index);
  if (request_.in.empty() || !exact()) return;
  here_.assign(context_->plan.slices().size(), false);
  for (const auto& slices : tensor_slices_) missing_slices_.push_back(slices.size());
}

absl::Status ShardExchange::CheckRequest() const {
  const size_t versions = request_.push.versions.size();
  if (versions == 0 || versions == context_->plan.num_shards()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rank ", context_->id.rank(), ", step ", request_.push.step,
                                                 ": PushInfo.versions has ", versions, " versions for ",
                                                 context_->plan.num_shards(), " shards"));
}

void ShardExchange::Begin() {
  const bool empty = request_.push.samples == 0 && request_.kind != ShardCall::Kind::kInit;
  if (!sends() || empty) {
    MutexLock lock(mutex_);
    if (empty) ready_tensors_ = tensor_slices_.size();  // Nothing to send but the header.
    all_ready_at_ = Now();
  }
  for (uint32_t shard = 0; shard < context_->plan.num_shards(); ++shard) {
    {
      MutexLock lock(mutex_);
      shards_[shard].last_contact = Now();
    }
    OpenCall();
    StartCall(shard);
  }
  OnCallGone();  // Begin itself.
  if (!sends() || empty || request_.deferred) return;
  for (size_t tensor = 0; tensor < tensor_slices_.size(); ++tensor) TensorReady(tensor);
}

ShardCall::Request ShardExchange::MakeCall(uint32_t shard) {
  ShardCall::Request call;
  call.kind = request_.kind;
  call.plan = &context_->plan;
  call.shard = shard;
  call.out = &request_.out;
  call.in = &request_.in;
  if (exact()) {
    call.wants_slice = [this](uint32_t slice) { return WantsSlice(slice); };
    call.on_slice = [this](uint32_t slice) { OnSlice(slice); };
  }
  const auto wait = std::min<std::chrono::nanoseconds>(
      context_->notice_every, std::max<std::chrono::nanoseconds>(request_.give_up - Now(), kBackoffFirst));
  const auto wait_ms = static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(wait).count());
  const double bytes = static_cast<double>(context_->plan.shard_elements(shard)) * sizeof(float) * 2;
  call.timeout = wait + kCallMargin + SlowestTime(bytes);
  if (sends()) {
    *call.push.mutable_id() = context_->id;
    call.push.set_step(request_.push.step);
    const auto& versions = request_.push.versions;
    call.push.set_version(shard < versions.size() ? versions[shard] : request_.push.version);
    call.push.set_samples(request_.push.samples);
    call.push.set_wait_ms(wait_ms);
  } else {
    *call.pull.mutable_id() = context_->id;
    if (request_.version.has_value()) call.pull.set_version(*request_.version);
    call.pull.set_wait_ms(wait_ms);
  }
  return call;
}

std::vector<uint32_t> ShardExchange::ReadySlices(uint32_t shard) const {
  std::vector<uint32_t> slices;
  for (uint32_t slice : ready_) {
    if (context_->plan.slices()[slice].shard == shard) slices.push_back(slice);
  }
  return slices;
}

// Counted in open_calls_ by the caller.
void ShardExchange::StartCall(uint32_t shard) {
  ShardCall::Request request = MakeCall(shard);
  const auto timeout = request.timeout;
  request.hold = std::shared_ptr<void>(nullptr, [self = shared_from_this()](void*) { self->OnCallGone(); });
  auto call = std::make_shared<ShardCall>(
      std::move(request), [self = shared_from_this(), shard](const absl::Status& status, const ShardReply& reply) {
        self->OnCallEnd(shard, status, reply);
      });
  {
    // Before it begins: it can end at once, and would leave the state to a call that is over.
    MutexLock lock(mutex_);
    ShardState& state = shards_[shard];
    state.call = call;
    state.call_ends = Now() + timeout;
    state.stalled = false;
    ++state.attempts;
    if (sends()) call->Send(ReadySlices(shard), ready_tensors_ == tensor_slices_.size());
    if (decided_) call->Cancel();
  }
  call->Begin(context_->channels[shard]);
}

// Slice by slice: one is on its way while the next is looked at. A push of which a part is not finite is never
// completed, and the servers drop what came of it.
void ShardExchange::TensorReady(size_t tensor) {
  const std::vector<uint32_t>& slices = tensor_slices_[tensor];
  for (const uint32_t slice : slices) {
    const SliceInfo& info = context_->plan.slices()[slice];
    const float* values = request_.out[tensor].data() + info.offset;
    const bool finite = AllFinite(values, static_cast<size_t>(info.elements), BestIsa());
    MutexLock lock(mutex_);
    if (decided_) return;
    if (!finite) return End(NotFinite(tensor));
    SliceReady(info, slice == slices.back());
  }
}

void ShardExchange::SliceReady(const SliceInfo& slice, bool last_of_tensor) {
  ready_.push_back(slice.index);
  if (last_of_tensor) ++ready_tensors_;
  const bool last = ready_tensors_ == tensor_slices_.size();
  if (last) all_ready_at_ = Now();
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    if (shards_[shard].call == nullptr || shards_[shard].ended) continue;
    if (shard == slice.shard) {
      shards_[shard].call->Send({slice.index}, last);
    } else if (last) {
      shards_[shard].call->Send({}, true);
    }
  }
}

absl::Status ShardExchange::NotFinite(size_t tensor) const {
  const bool push = request_.kind != ShardCall::Kind::kInit;
  return absl::InvalidArgumentError(absl::StrCat(
      "rank ", context_->id.rank(),
      push ? absl::StrCat(", step ", request_.push.step, ": the gradient of") : ": the initial value of", " tensor ",
      context_->plan.layout()[tensor].name, " is not finite", push ? "; the learning rate may be too large" : ""));
}

absl::Status ShardExchange::ClassifyFailure(ShardState& state, uint32_t shard, const absl::Status& status,
                                            TimePoint now) {
  const std::string where = absl::StrCat("shard ", shard, " at ", context_->addresses[shard]);
  // The server's own DEADLINE_EXCEEDED comes before the call's.
  const bool heard =
      absl::IsResourceExhausted(status) || (absl::IsDeadlineExceeded(status) && now < state.call_ends - kDeadlineSlack);
  if (heard) state.last_contact = now;
  if (state.failing_since.has_value() && state.last_contact > *state.failing_since) state.failing_since.reset();
  // A connection that breaks is retried from then on; a call without an answer has been silent before it ended.
  if (!state.failing_since.has_value()) state.failing_since = absl::IsUnavailable(status) ? now : state.last_contact;
  // While gradients are still being computed, silence is no problem.
  const bool all_ready = !sends() || ready_tensors_ == tensor_slices_.size();
  const auto silent = all_ready ? now - std::max(*state.failing_since, all_ready_at_) : std::chrono::nanoseconds(0);
  const bool passing = heard || absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  if (!passing) return Annotate(status, where);
  if (now >= request_.give_up && heard) return absl::DeadlineExceededError(absl::StrCat(where, ": ", Message(status)));
  if (now >= request_.give_up || silent > context_->connect_timeout) {
    return absl::UnavailableError(absl::StrCat(where, ": not reachable for ", FormatSeconds(silent),
                                               " (--connect_timeout): ", ConnectionProblem(status)));
  }
  return absl::OkStatus();
}

void ShardExchange::CheckProgress(TimePoint now) {
  constexpr double kMessageBytes = kSliceElements * sizeof(float);
  const auto limit = context_->notice_every + kCallMargin + SlowestTime(kMessageBytes);
  MutexLock lock(mutex_);
  // While gradients are still being computed, nothing has to move.
  if (decided_ || (sends() && ready_tensors_ < tensor_slices_.size())) return;
  for (ShardState& state : shards_) {
    if (state.call == nullptr || state.stalled) continue;
    if (now - std::max({state.call->moved_at(), all_ready_at_}) <= limit) continue;
    state.stalled = true;
    state.call->Cancel();
  }
}

void ShardExchange::OnCallEnd(uint32_t shard, const absl::Status& ended_with, const ShardReply& reply) {
  std::string notice;
  {
    MutexLock lock(mutex_);
    ShardState& state = shards_[shard];
    // Of a call that this client still wants, CANCELLED is the server's word: it was too slow, or had to make room.
    const absl::Status status =
        absl::IsCancelled(ended_with)
            ? absl::UnavailableError(state.stalled ? "no progress for too long" : "the server cancelled the call")
            : ended_with;
    state.call = nullptr;
    if (decided_) return;
    if (status.ok()) {
      state.ended = true;
      state.reply = reply;
      if (reply.answer == PushAnswer::kFenced) {
        return End(absl::FailedPreconditionError(absl::StrCat(
            "rank ", context_->id.rank(), ", incarnation ", context_->id.incarnation(), ": fenced by shard ", shard,
            ": the rank has a new owner, or generation ", reply.generation, " of the job is running")));
      }
      const bool all = std::all_of(shards_.begin(), shards_.end(), [](const ShardState& each) { return each.ended; });
      if (all) End(absl::OkStatus());
      return;
    }
    const TimePoint now = Now();
    state.last_contact = std::max({state.last_contact, reply.written_at, reply.read_at});
    if (absl::Status judged = ClassifyFailure(state, shard, status, now); !judged.ok()) return End(judged);
    const auto delay = absl::IsDeadlineExceeded(status) ? std::chrono::nanoseconds(0) : Backoff(state.attempts);
    const bool parked = absl::IsDeadlineExceeded(status) && now < state.call_ends - kDeadlineSlack;
    if (parked || state.attempts % kNoticeEveryAttempts == 1) {
      notice = parked ? Message(status)
                      : absl::StrCat("shard ", shard, " at ", context_->addresses[shard], ": ",
                                     ConnectionProblem(status), "; retrying");
    }
    OpenCall();  // The next one, from now on.
    const auto again = [self = shared_from_this(), shard] { self->StartCall(shard); };
    if (!timer_.At(now + delay, again)) {
      End(absl::CancelledError("the client is shutting down"));
      OnCallGone();
    }
  }
  if (!notice.empty()) Notice(notice);
}

void ShardExchange::OpenCall() {
  MutexLock lock(end_mutex_);
  ++open_calls_;
}

// Fixes the result. The exchange finishes when the last call has released the memory.
void ShardExchange::End(const absl::Status& status) {
  decided_ = true;
  for (ShardState& state : shards_) {
    if (state.call != nullptr) state.call->Cancel();
  }
  changed_.NotifyAll();
  absl::StatusOr<ExchangeResult> result = status.ok() ? absl::StatusOr<ExchangeResult>(MakeResult()) : status;
  MutexLock lock(end_mutex_);
  result_ = std::move(result);
  MaybeFinish();
}

void ShardExchange::MaybeFinish() {
  if (!result_.has_value() || open_calls_ > 0 || finished_) return;
  finished_ = true;
  ended_.NotifyAll();
  if (callback_) timer_.At(Now(), [self = shared_from_this()] { self->callback_(self->Wait()); });
}

void ShardExchange::OnCallGone() {
  MutexLock lock(end_mutex_);
  --open_calls_;
  MaybeFinish();
}

void ShardExchange::Abort(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (!decided_) End(status);
}

// A slice that may already be computed on must not be written again.
bool ShardExchange::WantsSlice(uint32_t slice) {
  MutexLock lock(mutex_);
  return !here_[slice];
}

void ShardExchange::OnSlice(uint32_t slice) {
  MutexLock lock(mutex_);
  here_[slice] = true;
  if (--missing_slices_[context_->plan.slices()[slice].tensor] == 0) changed_.NotifyAll();
}

absl::Status ShardExchange::WaitTensor(size_t tensor) {
  if (request_.in.empty() || !exact()) return Wait().status();
  {
    MutexLock lock(mutex_);
    while (missing_slices_[tensor] > 0 && !decided_) changed_.Wait(mutex_);  // Bounded as in Wait.
    if (missing_slices_[tensor] == 0) return absl::OkStatus();
  }
  return Wait().status();
}

absl::StatusOr<ExchangeResult> ShardExchange::Wait() {
  MutexLock lock(end_mutex_);
  while (!finished_)
    ended_.Wait(end_mutex_);  // Bounded: ClassifyFailure ends every call, and gRPC every cancelled one.
  return *result_;
}

ExchangeResult ShardExchange::MakeResult() const {
  ExchangeResult result;
  const TimePoint now = Now();
  TimePoint first_reply = TimePoint::max();
  uint64_t waited_us = 0;
  for (const ShardState& state : shards_) {
    result.versions.push_back(state.reply.version);
    if (state.reply.answer != PushAnswer::kNone) result.answers.push_back(state.reply.answer);
    waited_us = std::max(waited_us, state.reply.waited_us);
    if (state.reply.first_reply_at != TimePoint()) first_reply = std::min(first_reply, state.reply.first_reply_at);
  }
  result.version = *std::min_element(result.versions.begin(), result.versions.end());
  const double total = Seconds(now - all_ready_at_);
  result.pull_s = std::clamp(Seconds(now - std::min(first_reply, now)), 0.0, total);
  result.wait_s = std::min(static_cast<double>(waited_us) * 1e-6, total - result.pull_s);
  result.push_s = total - result.pull_s - result.wait_s;
  if (request_.kind == ShardCall::Kind::kPull) {  // Asking is part of pulling.
    result.pull_s += result.push_s;
    result.push_s = 0;
  }
  return result;
}

}  // namespace ps
