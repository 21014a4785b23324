#include "worker/client/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/half_floats.h"
#include "common/optimizers/optimizer.h"
#include "common/simd.h"
#include "common/status.h"
#include "worker/link/call_messages.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kPauseFirst(40);
constexpr std::chrono::milliseconds kPauseLongest(1000);
constexpr std::chrono::milliseconds kShortestWait(20);
// A call is given its wait at the server, and on top this and the time that its bytes take at the slowest rate: as a
// whole, and for each message.
constexpr std::chrono::seconds kCallMargin(10);
constexpr double kSlowestBytesPerSecond = 32 << 10;
constexpr absl::string_view kTooEarly = "it answered before the push was complete";
constexpr absl::string_view kNoMember = "it does not take this worker for a member: another generation may be running";

std::chrono::nanoseconds SlowestTime(double bytes) {
  return std::chrono::nanoseconds(static_cast<int64_t>(bytes / kSlowestBytesPerSecond * 1e9));
}

TimePoint EndOf(absl::Duration time) {
  return time == absl::InfiniteDuration() ? TimePoint::max() : Now() + ToChrono(time);
}

// By tensor; empty: it has to do with all.
std::vector<bool> CarriedTensors(const ExchangeRequest& request, size_t tensors) {
  if (!request.pushes() || request.push.tensors.empty()) return {};
  std::vector<bool> carried(tensors);
  for (const uint32_t tensor : request.push.tensors) {
    if (tensor < tensors) carried[tensor] = true;  // Else CheckRequest says it.
  }
  return carried;
}

constexpr size_t kSlicesAtOnce = 8;  // Together a MiB, unless tensors are small.

}  // namespace

RetryingExchange::RetryingExchange(std::shared_ptr<const ExchangeContext> context, Timer& timer,
                                   ExchangeRequest request, Client::DoneCallback callback)
    : context_(std::move(context)),
      timer_(timer),
      request_(std::move(request)),
      out_(request_.out),
      absent_(request_.out.size(), 0),
      carried_(CarriedTensors(request_, context_->plan.layout().size())),
      carries_(SlicesOf(context_->plan, request_.push.tensors)),
      tensor_slices_(SlicesOfTensors(context_->plan)),
      // Values that are copied are in the cache: to look at them costs nothing more.
      servers_look_(request_.pushes() && !request_.push.skip_not_finite && request_.shared != nullptr &&
                    !request_.staged && !request_.encoded &&
                    // Where each shard makes its own versions, a push is to be refused by all of them.
                    (context_->exact_versions || context_->plan.num_shards() == 1) &&
                    std::all_of(context_->links.begin(), context_->links.end(),
                                [](const auto& link) { return link->server_looks(); })),
      // A pull says which version it wants; what a push brings, its first attempt shows.
      shards_(context_->plan.num_shards(),
              ShardState{.retry = RetryPolicy({.connect_timeout = context_->patience.longest,
                                               .give_up = request_.give_up,
                                               .pause_first = kPauseFirst,
                                               .pause_longest = kPauseLongest,
                                               .spread = context_->spread},
                                              timer_.now()),
                         .version = request_.version}),
      ready_(context_->plan, request_.has_constants(), carried_),
      samples_(request_.push.samples),
      told_samples_(request_.push.samples),
      callback_(std::move(callback)) {
  if (exact()) arrived_.emplace(context_->plan, request_.has_constants(), carried_);
}

std::string RetryingExchange::Where(uint32_t shard) const {
  return absl::StrCat("shard ", shard, " at ", context_->links[shard]->address());
}

absl::Status RetryingExchange::CheckRequest() const {
  return Annotate(ps::CheckRequest(request_, context_->plan), Who());
}

std::string RetryingExchange::Who() const {
  return absl::StrCat("rank ", context_->rank, request_.pushes() ? absl::StrCat(", step ", request_.push.step) : "");
}

void RetryingExchange::Begin() {
  {
    MutexLock lock(mutex_);
    if (request_.sends_no_slices()) {
      ready_.EndAll();
      all_ready_at_ = timer_.now();
    }
  }
  // Each rank begins with another shard. All would else feed them in one order, and over a network the last would get
  // its share later than the first, all the time.
  const uint32_t shards = context_->plan.num_shards();
  for (uint32_t i = 0; i < shards; ++i) StartCall((context_->rank + i) % shards);
  if (!request_.sends_no_slices() && !request_.deferred) {
    for (size_t tensor = 0; tensor < tensor_slices_.size(); ++tensor) {
      const bool sent = request_.has_constants() || IsPushed(context_->plan.layout()[tensor].kind);
      if (sent && Carries(tensor)) TensorReady(tensor);
    }
  }
  ReleaseMemory();  // Begin's own hold: it reads the gradients.
}

CallKind RetryingExchange::Kind() const {
  const bool is_push = !request_.pushes() || told_samples_ > 0 || request_.push.samples == 0;
  return is_push || request_.empty_contributions ? request_.kind : CallKind::kPull;
}

CallRequest RetryingExchange::MakeCallRequest(uint32_t shard, TimePoint now) {
  CallRequest call;
  call.kind = Kind();
  const auto& versions = request_.push.versions;
  call.step = request_.push.step;
  call.version = shard < versions.size() ? versions[shard] : request_.push.version;
  call.samples = told_samples_;
  call.contribution = request_.push.contribution;
  call.passed = request_.push.passed;
  call.learning_rate = request_.push.learning_rate;
  if (request_.push.groups.has_value()) call.groups = &*request_.push.groups;
  call.runs = request_.push.runs.value_or(0);
  call.edition = 2 * request_.begun + (anew_ ? 1 : 0);
  call.exact_version = request_.version;
  call.pull_step = request_.step;
  // A server that lets a call wait is to answer before it would be taken for one that is gone.
  const auto wait =
      std::min<std::chrono::nanoseconds>({context_->notice_every, context_->patience.longest / 2,
                                          std::max<std::chrono::nanoseconds>(request_.give_up - now, kShortestWait)});
  call.wait = std::chrono::duration_cast<std::chrono::milliseconds>(wait);
  const double tensors = request_.state == nullptr ? 2 : 2 + kMaxStateTensors;
  const double bytes = static_cast<double>(context_->plan.shard_elements(shard)) * sizeof(float) * tensors;
  call.timeout = wait + kCallMargin + SlowestTime(bytes);
  // What comes of a version in the making may be forgotten, so it does not go with what is kept of another.
  call.traffic = context_->traffic;
  call.stream = call.kind == CallKind::kPushPull && exact() && context_->pulled == nullptr;
  if (ReceivesSlices(call.kind) && !request_.float32) call.pulled = context_->pulled.get();
  call.view = request_.view;
  call.out = &out_;
  call.state = request_.state;
  call.absent_tensors = &absent_;
  if (!carries_.empty()) call.carries = &carries_;
  call.in = &request_.in;
  if (request_.encoded) call.encoded = request_.shared.get();
  call.float32 = request_.float32;
  if (!request_.float32) call.weights = context_->wire.weights;
  if (request_.shared != nullptr && request_.shared->shared() && !request_.shared->detached()) {
    call.shared = request_.shared;
  }
  if (exact() || request_.pushes()) call.wants_slice = [this](uint32_t slice) { return WantsSlice(slice); };
  if (exact()) call.on_slice = [this](uint32_t slice) { OnSlice(slice); };
  Check(TryHoldMemory(), "no call begins after an exchange has ended");
  call.memory_in_use = std::shared_ptr<void>(nullptr, [self = shared_from_this()](void*) { self->ReleaseMemory(); });
  return call;
}

void RetryingExchange::StartCall(uint32_t shard) {
  std::shared_ptr<ShardCall> call;
  {
    MutexLock lock(mutex_);
    if (decided_) return;  // It ended between two attempts.
    ShardState& state = shards_[shard];
    Check(state.call == nullptr && !state.reply.has_value(), "a shard is asked by one call at a time");
    const TimePoint now = timer_.now();
    CallRequest request = MakeCallRequest(shard, now);
    state.retry.BeginAttempt(now, now + request.timeout);
    state.stalled = false;
    state.outdated = false;
    call = context_->links[shard]->MakeCall(
        std::move(request), [self = shared_from_this(), shard](const absl::Status& status, const ShardReply& reply) {
          self->OnCallEnd(shard, status, reply);
        });
    state.call = call;
    const bool empty = request_.pushes() && told_samples_ == 0;
    if (!PullsOnly()) call->Send(empty ? std::vector<uint32_t>() : ready_.OfShard(shard), ready_.all());
  }
  call->Begin();  // Without the lock: it may end at once.
}

void RetryingExchange::CheckProgress() {
  const std::chrono::nanoseconds quiet = context_->notice_every + kCallMargin;
  const std::chrono::nanoseconds longest = context_->patience.longest;
  const auto usual = std::min<std::chrono::nanoseconds>(quiet + SlowestTime(kMostMessageSliceBytes), longest);
  const TimePoint now = timer_.now();
  MutexLock lock(mutex_);
  // While gradients are still being computed, nothing has to move.
  if (decided_ || !all_ready_at_.has_value()) return;
  for (ShardState& state : shards_) {
    if (state.call == nullptr || state.stalled) continue;
    // Whatever the patience, a message that is on its way has its time.
    const auto limit = std::max<std::chrono::nanoseconds>(
        usual, std::min(quiet, longest) + SlowestTime(static_cast<double>(state.call->unseen_bytes())));
    if (now - std::max(state.call->moved_at(), *all_ready_at_) <= limit) continue;
    state.stalled = true;
    state.call->Cancel();
  }
}

void RetryingExchange::OnCallEnd(uint32_t shard, const absl::Status& status, const ShardReply& reply) {
  std::shared_ptr<ShardCall> ended;  // Let go of last, without the lock.
  std::string notice;
  {
    MutexLock lock(mutex_);
    ended = std::move(shards_[shard].call);
    if (decided_) return;
    // Whatever a server answers, weights must not come before the last gradient is ready: ask again then.
    const bool too_early = ReceivesSlices(request_.kind) && !all_ready_at_.has_value();
    if (status.ok() && context_->on_fenced && reply.answer == PushAnswer::kFenced) {  // Somebody finds out why.
      context_->on_fenced(reply.generation);
      notice = OnFailure(shard, absl::UnavailableError(kNoMember), reply);
    } else if (status.ok() && !too_early) {
      OnAnswer(shard, reply);
    } else if (shards_[shard].outdated) {
      AskAgain(shard, timer_.now());
    } else {
      notice = OnFailure(shard, status.ok() ? absl::UnavailableError(kTooEarly) : status, reply);
    }
  }
  if (!notice.empty() && context_->on_notice) context_->on_notice(notice);
}

void RetryingExchange::OnAnswer(uint32_t shard, const ShardReply& reply) {
  absl::Status status = CheckReply(shard, reply);
  if (status.ok()) status = KeepVersion(shard, reply);
  if (!status.ok()) return End(status);
  shards_[shard].reply = reply;
  if (reply.answer == PushAnswer::kApplied || reply.answer == PushAnswer::kDuplicate) CommitResiduals(shard);
  const bool all = std::all_of(shards_.begin(), shards_.end(), [](const auto& each) { return each.reply.has_value(); });
  if (!all) return;
  if (context_->on_pushed && request_.pushes() && !PullsOnly() && told_samples_ > 0) {
    context_->on_pushed(request_.push.step, told_samples_);
  }
  End(absl::OkStatus());
}

absl::Status RetryingExchange::CheckReply(uint32_t shard, const ShardReply& reply) const {
  if (reply.answer == PushAnswer::kFenced) {
    return FailedPrecondition("rank ", context_->rank, ", incarnation ", context_->incarnation, ": fenced by shard ",
                              shard, ": the rank has a new owner, or generation ", reply.generation,
                              " of the job is running");
  }
  if (request_.pushes() && !PullsOnly() && reply.answer == PushAnswer::kNone) {
    return Internal(Where(shard), ": it ended the push without an answer");
  }
  const std::vector<uint32_t>& pushed = context_->plan.pushed_shard_slices(shard);
  size_t slices = PullsOnly() ? context_->plan.shard_slices(shard).size() : pushed.size();
  if (!PullsOnly() && !carries_.empty()) {
    slices = static_cast<size_t>(
        std::count_if(pushed.begin(), pushed.end(), [this](uint32_t slice) { return Contain(carries_, slice); }));
  }
  if (!ReceivesSlices(request_.kind) || reply.slices == slices) return absl::OkStatus();
  return Internal(Where(shard), ": it sent ", reply.slices, " of its ", slices, " slices");
}

absl::Status RetryingExchange::KeepVersion(uint32_t shard, const ShardReply& reply) {
  if (!exact() || reply.slices == 0) return absl::OkStatus();
  std::optional<uint64_t>& version = shards_[shard].version;
  if (!version.has_value()) version = reply.version;
  if (*version == reply.version) return absl::OkStatus();
  return Internal(Where(shard), ": it sent slices of version ", reply.version, " instead of ", *version);
}

std::string RetryingExchange::OnFailure(uint32_t shard, const absl::Status& ended_with, const ShardReply& reply) {
  ShardState& state = shards_[shard];
  if (absl::Status mixed = KeepVersion(shard, reply); !mixed.ok()) {
    End(mixed);
    return "";
  }
  // Where this client still wants the call, CANCELLED is the server's word: it was too slow, or had to make room.
  absl::Status status =
      absl::IsCancelled(ended_with)
          ? absl::UnavailableError(state.stalled ? "no progress for too long" : "the server cancelled the call")
          : ended_with;
  if (context_->on_fenced && IsFenced(status)) {
    context_->on_fenced(0);
    status = absl::UnavailableError(kNoMember);
  }
  if (reply.moved_at != TimePoint()) state.retry.Heard(reply.moved_at);
  const TimePoint now = timer_.now();
  const RetryDecision decision = state.retry.ClassifyFailure(status, now, all_ready_at_, state.stalled);
  if (decision.outcome != RetryDecision::Outcome::kRetry) {
    const bool not_finite =
        servers_look_ && absl::IsInvalidArgument(status) && absl::StrContains(status.message(), "is not finite");
    if (not_finite && context_->on_not_finite) context_->on_not_finite();
    End(EndStatus(shard, decision, status));
    return "";
  }
  if (!AskAgain(shard, now + decision.pause)) return "";
  // What follows these is known soon.
  if (!decision.notice || status.message() == kTooEarly || status.message() == kNoMember) return "";
  return decision.waiting
             ? Message(status)
             : absl::StrCat(Where(shard), ": ", ConnectionProblem(status), context_->patience.Trying(decision.silent));
}

bool RetryingExchange::AskAgain(uint32_t shard, TimePoint when) {
  if (timer_.At(when, [self = shared_from_this(), shard] { self->StartCall(shard); })) return true;
  End(absl::CancelledError("the client is shutting down"));
  return false;
}

absl::Status RetryingExchange::EndStatus(uint32_t shard, const RetryDecision& decision,
                                         const absl::Status& status) const {
  switch (decision.outcome) {
    case RetryDecision::Outcome::kTimeUp:
      return absl::DeadlineExceededError(absl::StrCat(Where(shard), ": ", Message(status)));
    case RetryDecision::Outcome::kUnreachable:
      return Unavailable(
          Who(), ": ", Where(shard), ": not reachable for ", FormatSeconds(decision.silent),
          decision.silent > context_->patience.longest ? absl::StrCat(" (", context_->patience.flag(), "): ") : ": ",
          ConnectionProblem(status));
    default:
      return Annotate(status, Where(shard));
  }
}

// Fixes the result. The exchange finishes when the last call has released the memory; between two attempts there is
// none, so then it finishes here.
void RetryingExchange::End(const absl::Status& status) {
  Check(!decided_, "an exchange has one result");
  decided_ = true;
  // A push that is not answered may still count: what servers were told of it must not change.
  if (!status.ok() && told_slices_ && request_.shared != nullptr) request_.shared->Detach();
  for (const ShardState& state : shards_) {
    if (state.call != nullptr) state.call->Cancel();
  }
  changed_.NotifyAll();
  WakeTaker();
  absl::StatusOr<ExchangeResult> result = status.ok() ? absl::StatusOr<ExchangeResult>(MakeResult()) : status;
  MutexLock lock(end_mutex_);
  result_ = std::move(result);
  for (ShardState& state : shards_) {
    if (state.reply.has_value()) state.reply->view = {};  // It is the result's.
  }
  MaybeFinish();
}

void RetryingExchange::MaybeFinish() {
  if (!result_.has_value() || memory_users_ > 0 || finished_) return;
  finished_ = true;
  if (request_.residuals != nullptr) request_.residuals->EndUse();
  ended_.NotifyAll();
  WakeTaker();
  if (!callback_ && releases_.empty()) return;
  timer_.At(timer_.now(), [self = shared_from_this(), callback = std::exchange(callback_, nullptr),
                           releases = std::exchange(releases_, {})] {
    for (const std::function<void()>& release : releases) release();
    if (callback) callback(self->Wait());
  });
}

bool RetryingExchange::TryHoldMemory() {
  MutexLock lock(end_mutex_);
  if (!finished_) ++memory_users_;
  return !finished_;
}

void RetryingExchange::ReleaseMemory() {
  MutexLock lock(end_mutex_);
  Check(memory_users_ > 0, "memory is released once for each use");
  --memory_users_;
  MaybeFinish();
}

void RetryingExchange::Abort(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (!decided_) End(status);
}

// A slice that may already be computed on must not be written again.
bool RetryingExchange::WantsSlice(uint32_t slice) {
  // A push that has become a pull brings constants, too, for which there need not be memory.
  const size_t tensor = context_->plan.slices()[slice].tensor;
  if (request_.pushes() && !(IsPushed(context_->plan.layout()[tensor].kind) && Carries(tensor))) return false;
  MutexLock lock(mutex_);
  if (!all_ready_at_.has_value()) return false;  // Gradients may still be computed on what is there.
  return !arrived_.has_value() || !arrived_->Has(slice);
}

void RetryingExchange::OnSlice(uint32_t slice) {
  MutexLock lock(mutex_);
  if (!arrived_->Add(slice)) return;
  changed_.NotifyAll();
  WakeTaker();
}

bool RetryingExchange::TakeReplies(const std::function<bool()>& over, TimePoint end) {
  if (context_->links.size() != 1 || over()) return false;
  std::thread::id nobody;
  if (!taker_.compare_exchange_strong(nobody, std::this_thread::get_id())) return false;
  const bool took = context_->links.front()->TakeReplies(over, end);
  taker_ = std::thread::id();
  return took;
}

// The taker looks under the lock that is held here, after it is known to be one: it sees the change, or is woken.
void RetryingExchange::WakeTaker() {
  const std::thread::id taker = taker_;
  if (taker != std::thread::id() && taker != std::this_thread::get_id()) context_->links.front()->WakeTaker();
}

std::optional<absl::Status> RetryingExchange::WaitTensorFor(size_t tensor, absl::Duration time) {
  const TimePoint end = EndOf(time);
  if (ReceivesSlices(request_.kind) && exact() && tensor < tensor_slices_.size()) {
    const auto over = [this, tensor] {
      MutexLock lock(mutex_);
      return arrived_->HasTensor(tensor) || decided_;
    };
    (void)TakeReplies(over, end);
    MutexLock lock(mutex_);
    // Bounded as in WaitUntil.
    while (!arrived_->HasTensor(tensor) && !decided_) {
      if (!changed_.WaitUntil(mutex_, end)) break;
    }
    if (arrived_->HasTensor(tensor)) return absl::OkStatus();
  }
  const std::optional<absl::StatusOr<ExchangeResult>> result = WaitUntil(end);
  return result.has_value() ? std::optional<absl::Status>(result->status()) : std::nullopt;
}

std::optional<absl::StatusOr<ExchangeResult>> RetryingExchange::WaitFor(absl::Duration time) {
  return WaitUntil(EndOf(time));
}

std::optional<absl::StatusOr<ExchangeResult>> RetryingExchange::WaitUntil(TimePoint end) {
  const auto over = [this] {
    MutexLock lock(end_mutex_);
    return finished_;
  };
  (void)TakeReplies(over, end);
  MutexLock lock(end_mutex_);
  // Without an end it is bounded: ClassifyFailure ends every series of attempts, and a link every call.
  while (!finished_) {
    if (!ended_.WaitUntil(end_mutex_, end) && !finished_) return std::nullopt;
  }
  return *result_;
}

ExchangeResult RetryingExchange::MakeResult() const {
  std::vector<ShardReply> replies;
  for (const ShardState& state : shards_) replies.push_back(state.reply.value_or(ShardReply()));
  ExchangeResult result = CombineReplies(request_, replies, all_ready_at_, timer_.now());
  if (not_finite_.has_value()) {
    result.skipped = context_->plan.layout()[*not_finite_].name;
    result.why_skipped = "is not finite" + TooLarge(*not_finite_);
  }
  if (!PullsOnly() || !request_.pushes()) return result;
  result.next_step = request_.push.step;  // There was no push.
  if (request_.kind == CallKind::kPush) {
    result.version = request_.push.version;
    result.versions = request_.push.versions;
  }
  return result;
}

void RetryingExchange::BeginSending(size_t tensor, std::span<const float> gradient, std::function<void()> release,
                                    bool finite) {
  if (!BeginTensor(tensor, gradient) || !TryHoldMemory()) {
    if (release) release();
    return;
  }
  auto send = [self = shared_from_this(), tensor, finite, release = std::move(release)] {
    self->SendTensor(tensor, finite);
    if (release) self->ReleaseLater(release);
    self->ReleaseMemory();
  };
  if (context_->sender == nullptr) return send();
  context_->sender->Post(std::move(send));
}

void RetryingExchange::TensorAbsent(size_t tensor) {
  MutexLock lock(mutex_);
  if (decided_ || request_.sends_no_slices()) return;
  const Layout& layout = context_->plan.layout();
  const bool may = request_.pushes() && request_.push.contribution == PushContribution::kGradient &&
                   tensor < layout.size() && layout[tensor].kind == TensorKind::kWeight;
  if (!may || !ready_.BeginTensor(tensor)) {
    return End(InvalidArgument(Who(), ": TensorAbsent for tensor ", tensor,
                               ", which is ready already, or has no gradient that is pushed"));
  }
  absent_[tensor] = 1;
  const std::vector<uint32_t>& slices = tensor_slices_[tensor];
  SlicesReady(slices, /*last_of_tensor=*/true);
}

bool RetryingExchange::BeginTensor(size_t tensor, std::span<const float> gradient) {
  MutexLock lock(mutex_);
  if (decided_ || request_.sends_no_slices()) return false;
  const Layout& layout = context_->plan.layout();
  if (!ready_.BeginTensor(tensor)) {
    End(InvalidArgument(Who(), ": TensorReady for tensor ", tensor,
                        ", which is ready already, is not pushed or does not exist"));
    return false;
  }
  if (!gradient.empty() && request_.push.rounded) {
    End(InvalidArgument(Who(), ": TensorReady with a gradient of tensor ", layout[tensor].name,
                        ", but PushInfo.rounded"));
    return false;
  }
  if (!gradient.empty()) out_[tensor] = gradient;
  if (request_.push.rounded || out_[tensor].size() == static_cast<size_t>(layout[tensor].elements())) return true;
  End(InvalidArgument(Who(), ": TensorReady with ", out_[tensor].size(), " elements for tensor ",
                      ToString(layout[tensor])));
  return false;
}

// Some slices after the others: they are on their way while the next are looked at. A push of which a part is not
// finite is never completed, and the servers drop what came of it.
void RetryingExchange::SendTensor(size_t tensor, bool finite) {
  const std::span<const uint32_t> slices = tensor_slices_[tensor];
  for (size_t begin = 0; begin < slices.size(); begin += kSlicesAtOnce) {
    const auto some = slices.subspan(begin, std::min(kSlicesAtOnce, slices.size() - begin));
    const bool all_finite =
        std::all_of(some.begin(), some.end(), [&](uint32_t slice) { return LookAt(tensor, slice, finite); });
    MutexLock lock(mutex_);
    if (decided_) return;
    if (!all_finite) return OnNotFinite(tensor);
    SlicesReady(some, begin + some.size() == slices.size());
  }
}

bool RetryingExchange::LookAt(size_t tensor, uint32_t slice, bool finite) const {
  const SliceInfo& info = context_->plan.slices()[slice];
  if (request_.rounded != nullptr) return LookAtRounded(info, finite);
  const float* values = out_[tensor].data() + info.offset;
  if (Encodes(tensor)) {
    // A difference of weights has its worker's momentum in it.
    const bool gradient = request_.push.contribution == PushContribution::kGradient;
    return EncodeSlice(values, info, *request_.shared, request_.residuals.get(),
                       gradient ? context_->wire.momentum_correction : 0, context_->wire.error_feedback_decay);
  }
  finite = finite || servers_look_ || AllFinite(values, static_cast<size_t>(info.elements), BestIsa());
  if (request_.staged && finite) {
    std::memcpy(request_.shared->bytes().data() + request_.shared->model().slice(info).begin, values,
                static_cast<size_t>(info.bytes()));
  }
  return finite;
}

bool RetryingExchange::LookAtRounded(const SliceInfo& slice, bool finite) const {
  const ModelMemory::Place place = request_.rounded->model().slice(slice);
  const uint8_t* const values = request_.rounded->bytes().data() + place.begin;
  const auto elements = static_cast<size_t>(slice.elements);
  if (!finite) {
    finite = place.type == WireType::kFloat32 ? AllFinite(values, elements, BestIsa())
                                              : AllFiniteHalf(values, elements, place.type, BestIsa());
  }
  if (finite && request_.shared != request_.rounded) {
    std::memcpy(request_.shared->bytes().data() + place.begin, values, place.values);
  }
  return finite;
}

void RetryingExchange::CommitResiduals(uint32_t shard) {
  if (request_.residuals == nullptr || PullsOnly() || told_samples_ == 0) return;
  std::vector<uint32_t> encoded;
  for (const uint32_t slice : ready_.slices()) {
    const SliceInfo& info = context_->plan.slices()[slice];
    if (info.shard == shard && Encodes(info.tensor) && absent_[info.tensor] == 0) encoded.push_back(slice);
  }
  request_.residuals->Commit(shard, request_.push.step, encoded);
}

void RetryingExchange::ReleaseLater(const std::function<void()>& release) {
  MutexLock lock(end_mutex_);
  releases_.push_back(release);
}

void RetryingExchange::OnNotFinite(size_t tensor) {
  if (!request_.push.skip_not_finite) {
    if (request_.pushes() && context_->on_not_finite) context_->on_not_finite();
    return End(NotFinite(tensor));
  }
  not_finite_ = not_finite_.value_or(tensor);
  ready_.EndTensor();
  if (ready_.all()) (void)OnAllReady();
}

void RetryingExchange::SlicesReady(std::span<const uint32_t> slices, bool last_of_tensor) {
  for (const uint32_t slice : slices) ready_.Add(slice);
  told_slices_ = true;
  if (last_of_tensor) ready_.EndTensor();
  const bool last = ready_.all();
  if (last && OnAllReady()) return;
  for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
    ShardCall* call = shards_[shard].call.get();
    if (call == nullptr) continue;
    const std::vector<uint32_t> fresh = ready_.NewOfShard(shard, slices);
    if (last || !fresh.empty()) call->Send(fresh, last);
  }
}

bool RetryingExchange::SetSamples(uint32_t samples) {
  MutexLock lock(mutex_);
  if (decided_ || !request_.pushes() || request_.sends_no_slices() || ready_.all()) return false;
  samples_ = samples;
  return true;
}

bool RetryingExchange::OnAllReady() {
  all_ready_at_ = timer_.now();
  if (not_finite_.has_value()) samples_ = 0;
  if (samples_ == told_samples_) return false;
  told_samples_ = samples_;
  if (request_.kind == CallKind::kPush && PullsOnly()) {
    End(absl::OkStatus());
    return true;
  }
  // No shard has all of the push that it was told of, so it may still be replaced.
  anew_ = true;
  for (ShardState& state : shards_) {
    if (state.call == nullptr) continue;
    state.outdated = true;
    state.call->Cancel();
  }
  return true;
}

std::string RetryingExchange::TooLarge(size_t tensor) const {
  const WireType type = Encodes(tensor) ? request_.shared->model().weights().type : WireType::kFloat32;
  if (type == WireType::kFloat32) return "";
  return absl::StrCat(", or too large for --wire_dtype=", ToString(type));
}

absl::Status RetryingExchange::NotFinite(size_t tensor) const {
  const bool difference = request_.push.contribution == PushContribution::kWeightDifference;
  const char* const what = !request_.pushes() ? "the initial value of"
                           : difference       ? "the difference of"
                                              : "the gradient of";
  const char* const hint = !request_.pushes() ? ""
                           : difference       ? "; a learning rate, also the outer one, may be too large"
                                              : "; the learning rate may be too large";
  return InvalidArgument(Who(), ": ", what, " tensor ", context_->plan.layout()[tensor].name, " is not finite",
                         TooLarge(tensor), hint);
}

}  // namespace ps
