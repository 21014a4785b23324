#include "ps/client.h"

#include <unistd.h>

#include <atomic>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/connection_problem.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/layout_proto.h"
#include "common/metrics.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/client/exchange.h"
#include "worker/client/watch.h"
#include "worker/client/weights_hash.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kRetry(200);
constexpr std::chrono::seconds kCallTime(10);  // Of a control call.
constexpr std::chrono::seconds kCancelJoinTime(2);
constexpr std::chrono::seconds kUnreachableEvery(3);  // Between two notices of a server that cannot be reached.
constexpr std::chrono::seconds kProgressEvery(1);
constexpr std::chrono::milliseconds kDoneMargin(5000);
// gRPC ends a call at its deadline no earlier than this before it.
constexpr std::chrono::milliseconds kDeadlineSlack(100);

TimePoint After(absl::Duration time) {
  return time == absl::InfiniteDuration() ? TimePoint::max() : Now() + ToChrono(time);
}

uint64_t RandomJoinRequestId() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // Not 0.
}

// Two containers may have the same host name and process number.
std::string DefaultName() { return absl::StrFormat("%s-%d-%06x", HostName(), getpid(), RandomJoinRequestId() >> 40); }

void SetDeadline(grpc::ClientContext& context, std::chrono::nanoseconds time) {
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(time));
}

class ClientImpl final : public Client {
 public:
  explicit ClientImpl(const ClientOptions& options) : options_(options) {
    if (options_.name.empty()) options_.name = DefaultName();
  }

  ~ClientImpl() override {
    on_stop_.reset();
    EndExchanges(absl::CancelledError("the client is shutting down"));
    if (joined_ && !left_) (void)Leave("the worker ended without leaving");
    watch_.reset();
    timer_.Stop();  // Before what its calls use.
  }

  absl::Status JoinJob(const Layout& layout);

  uint32_t rank() const override { return context_->id.rank(); }
  uint64_t incarnation() const override { return context_->id.incarnation(); }
  uint64_t generation() const override { return context_->id.generation(); }
  uint32_t num_workers() const override { return joined_as_.num_workers(); }
  uint32_t num_shards() const override { return context_->plan.num_shards(); }
  const std::string& name() const override { return joined_as_.name(); }
  const std::string& mode() const override { return joined_as_.mode(); }
  bool synchronous() const override { return joined_as_.synchronous(); }
  uint64_t start_step() const override { return joined_as_.start_step(); }
  const std::string& replaced() const override { return joined_as_.replaced(); }
  bool lead() const override { return lead_; }
  bool should_initialise() const override { return initialise_; }

  absl::Status Initialise(const ConstTensors& values) override {
    ShardExchange::Request request;
    request.kind = ShardCall::Kind::kInit;
    request.out = values;
    return Run(std::move(request), options_.start_timeout, nullptr)->Wait().status();
  }

  absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) override;

  absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& gradients) override {
    return StartPushPull(push, gradients, {}, false, nullptr)->Wait();
  }
  absl::StatusOr<ExchangeResult> Pull(const MutableTensors& weights, std::optional<uint64_t> version) override {
    ShardExchange::Request request;
    request.in = weights;
    request.version = version;
    return Run(std::move(request), absl::InfiniteDuration(), nullptr)->Wait();
  }
  absl::StatusOr<ExchangeResult> PushPull(const PushInfo& push, const ConstTensors& gradients,
                                          const MutableTensors& weights) override {
    return StartPushPull(push, gradients, weights, false, nullptr)->Wait();
  }

  std::shared_ptr<Exchange> StartPushPull(const PushInfo& push, const ConstTensors& gradients,
                                          const MutableTensors& weights, bool deferred,
                                          DoneCallback callback) override {
    ShardExchange::Request request;
    request.kind = gradients.empty() ? ShardCall::Kind::kPull
                   : weights.empty() ? ShardCall::Kind::kPush
                                     : ShardCall::Kind::kPushPull;
    request.push = push;
    request.out = gradients;
    request.in = weights;
    request.deferred = deferred;
    if (!gradients.empty()) step_ = push.step;
    return Run(std::move(request), absl::InfiniteDuration(), std::move(callback));
  }

  absl::Status Done() override;
  absl::Status Leave(const std::string& reason) override;
  absl::StatusOr<HashedWeights> WeightsHash() override;

 private:
  std::shared_ptr<ShardExchange> Run(ShardExchange::Request request, absl::Duration limit, DoneCallback callback) {
    request.give_up = After(limit);
    auto exchange = std::make_shared<ShardExchange>(context_, timer_, std::move(request), std::move(callback));
    absl::Status failure;
    {
      MutexLock lock(mutex_);
      std::erase_if(running_, [](const auto& other) { return other.expired(); });
      running_.push_back(exchange);
      failure = failure_;
    }
    if (failure.ok()) failure = exchange->CheckRequest();
    exchange->Begin();
    if (!failure.ok()) exchange->Abort(failure);
    return exchange;
  }
  // Ends all exchanges in progress with this error, and waits until they have released their memory.
  void EndExchanges(const absl::Status& status) {
    std::vector<std::weak_ptr<ShardExchange>> running;
    {
      MutexLock lock(mutex_);
      running.swap(running_);
    }
    for (const auto& each : running) {
      if (const auto exchange = each.lock(); exchange != nullptr) {
        exchange->Abort(status);
        (void)exchange->Wait();
      }
    }
  }
  void Notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }
  // Calls until it is answered, the error is final, the chief was silent for connect_timeout, or what it waits for did
  // not come until `give_up`. `call` takes the context and the number of calls before it.
  template <typename Call>
  absl::Status UntilAnswered(const std::string& what, std::chrono::nanoseconds call_time, TimePoint give_up,
                             const std::stop_token& stop, Call call);
  v1::JoinRequest MakeJoinRequest(const Layout& layout) const;
  void CancelJoin(uint64_t join_request_id, const absl::Status& why);
  // Ends what is under way and what begins later with this error.
  void Fail(const absl::Status& failure);
  void ScheduleHeartbeat();
  // Every second: calls on which nothing moves are made again.
  void CheckProgress();
  void Heartbeat();
  void OnHeartbeat(const grpc::Status& status, const v1::HeartbeatReply& reply);
  void OnState(const v1::HeartbeatReply& state);

  ClientOptions options_;
  std::unique_ptr<v1::Chief::Stub> chief_;
  v1::JoinReply joined_as_;
  const std::shared_ptr<ExchangeContext> context_ = std::make_shared<ExchangeContext>();
  bool joined_ = false;
  bool left_ = false;
  std::atomic<bool> initialise_ = false;
  std::atomic<bool> lead_ = false;
  std::atomic<uint64_t> step_ = 0;
  Mutex mutex_;
  std::vector<std::weak_ptr<ShardExchange>> running_ ABSL_GUARDED_BY(mutex_);
  bool all_done_ ABSL_GUARDED_BY(mutex_) = false;  // Done has said who the lead is; what else is told may be older.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);   // The job's, as a heartbeat told.
  CondVar heartbeat_ended_;
  bool heartbeating_ ABSL_GUARDED_BY(mutex_) = false;
  Timer timer_;
  std::unique_ptr<ChiefWatch> watch_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

template <typename Call>
absl::Status ClientImpl::UntilAnswered(const std::string& what, std::chrono::nanoseconds call_time, TimePoint give_up,
                                       const std::stop_token& stop, Call call) {
  // Later than this before its deadline a call may have been ended by that, not by an answer.
  const auto slack = std::min<std::chrono::nanoseconds>(kDeadlineSlack, call_time / 10);
  TimePoint heard = Now();
  TimePoint noticed;
  for (int calls = 0;; ++calls) {
    const TimePoint began = Now();
    grpc::ClientContext context;
    SetDeadline(context, call_time);
    absl::Status status;
    {
      const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
      status = call(context, calls);
    }
    if (stop.stop_requested()) return absl::CancelledError(what + ": stopped");
    const TimePoint now = Now();
    const bool late = absl::IsDeadlineExceeded(status);
    const bool answered = absl::IsResourceExhausted(status) || (late && now < began + call_time - slack);
    if (!answered && !late && !absl::IsUnavailable(status)) return status;
    if (answered) heard = now;
    if (answered && now >= give_up) return status;
    const std::string problem = absl::StrCat("--server=", options_.server, ": ", ConnectionProblem(status));
    if (now - heard > ToChrono(options_.connect_timeout)) {
      return absl::UnavailableError(
          absl::StrCat(problem, "; gave up ", what, " after ", FormatSeconds(now - heard), " (--connect_timeout)"));
    }
    if (!answered && now - noticed >= kUnreachableEvery) {
      Notice(problem + "; retrying");
      noticed = now;
    }
    // An answer that came late says whom it waited for; one that did not come at all says nothing.
    if (late && answered) Notice(Message(status));
    MutexLock lock(mutex_);
    CondVar pause;
    if (now - began < kRetry) pause.WaitUntil(mutex_, began + kRetry);
  }
}

void ClientImpl::Fail(const absl::Status& failure) {
  std::vector<std::weak_ptr<ShardExchange>> running;
  {
    MutexLock lock(mutex_);
    if (left_ || !failure_.ok()) return;
    failure_ = failure;
    running = running_;
  }
  for (const auto& each : running) {
    if (const auto exchange = each.lock(); exchange != nullptr) exchange->Abort(failure);
  }
}

v1::JoinRequest ClientImpl::MakeJoinRequest(const Layout& layout) const {
  v1::JoinRequest request;
  request.set_protocol(v1::PROTOCOL_VERSION_1);
  request.set_job(options_.job);
  request.set_name(options_.name);
  if (options_.rank.has_value()) request.set_rank(*options_.rank);
  *request.mutable_layout() = ToProto(layout);
  request.mutable_experiment()->insert(options_.experiment.begin(), options_.experiment.end());
  request.set_host(HostName());
  request.set_join_request_id(RandomJoinRequestId());
  request.set_watches(true);
  return request;
}

// One call. If it does not arrive, the join's deadline and then the lease have the same effect, later.
void ClientImpl::CancelJoin(uint64_t join_request_id, const absl::Status& why) {
  v1::LeaveRequest request;
  request.set_join_request_id(join_request_id);
  request.set_reason(Message(why));
  v1::LeaveReply reply;
  grpc::ClientContext context;
  SetDeadline(context, kCancelJoinTime);
  (void)chief_->Leave(&context, request, &reply);
}

absl::Status ClientImpl::JoinJob(const Layout& layout) {
  PS_RETURN_IF_ERROR(ValidateLayout(layout));
  const absl::StatusOr<Endpoint> endpoint = ParseEndpoint("server", options_.server);
  if (!endpoint.ok()) return endpoint.status();
  if (options_.stop.stop_requested()) return absl::CancelledError("joining: stopped");
  const auto channel = MakeChannel(options_.server, grpc::InsecureChannelCredentials(), 0);
  chief_ = v1::Chief::NewStub(channel);
  const v1::JoinRequest request = MakeJoinRequest(layout);
  const auto call_time = std::min<std::chrono::nanoseconds>(kCallTime, ToChrono(options_.connect_timeout));
  const absl::Status joined = UntilAnswered(
      "joining", call_time, After(options_.start_timeout), options_.stop,
      [&](grpc::ClientContext& context, int) { return FromGrpc(chief_->Join(&context, request, &joined_as_)); });
  // The chief may have accepted it all the same.
  const bool unanswered = absl::IsCancelled(joined) || absl::IsDeadlineExceeded(joined) ||
                          absl::IsUnavailable(joined) || absl::IsResourceExhausted(joined);
  if (unanswered) CancelJoin(request.join_request_id(), joined);
  PS_RETURN_IF_ERROR(joined);
  context_->id = joined_as_.id();
  joined_ = true;
  if (joined_as_.slice_elements() != kSliceElements) {
    const std::string problem = absl::StrCat("the server cuts slices of ", joined_as_.slice_elements(),
                                             " elements; this client of ", kSliceElements);
    (void)Leave(problem);
    return absl::FailedPreconditionError(problem);
  }
  context_->plan = SlicePlan(layout, static_cast<uint32_t>(joined_as_.shards_size()));
  context_->synchronous = joined_as_.synchronous();
  context_->connect_timeout = ToChrono(options_.connect_timeout);
  context_->notice_every = ToChrono(options_.notice_every);
  context_->on_notice = options_.on_notice;
  for (const v1::ShardInfo& shard : joined_as_.shards()) {
    // The chief is reached as the user said, the others as they advertise.
    const std::string address = shard.shard() == 0 ? options_.server : shard.address();
    context_->addresses.push_back(address);
    context_->channels.push_back(shard.shard() == 0 ? channel
                                                    : MakeChannel(address, grpc::InsecureChannelCredentials(), 0));
  }
  initialise_ = joined_as_.initialise();
  lead_ = joined_as_.lead();
  step_ = joined_as_.start_step();
  if (!replaced().empty()) Notice(absl::StrCat("this worker replaces ", replaced(), " as rank ", rank()));
  on_stop_.emplace(options_.stop, [this] { Fail(absl::CancelledError("stopped")); });
  watch_ = std::make_unique<ChiefWatch>(
      *chief_, timer_, context_->id,
      ChiefWatch::Callbacks{.on_state = [this](const v1::HeartbeatReply& state) { OnState(state); },
                            .on_refused = [this](const absl::Status& status) { Fail(status); }});
  watch_->Start();
  ScheduleHeartbeat();
  CheckProgress();
  return absl::OkStatus();
}

absl::StatusOr<ExchangeResult> ClientImpl::Start(const ConstTensors& initial_values, const MutableTensors& weights) {
  const TimePoint deadline = After(options_.start_timeout);
  TimePoint heard = Now();
  std::optional<uint64_t> version;  // The newest, as long as there is nothing to tell which one.
  for (;;) {
    if (initialise_) PS_RETURN_IF_ERROR(Initialise(initial_values));
    // Short waits, so that a grant to initialise that passes on is seen.
    ShardExchange::Request request;
    request.in = weights;
    request.version = version;
    const auto left = std::min<std::chrono::nanoseconds>(deadline - Now(), ToChrono(options_.notice_every));
    absl::StatusOr<ExchangeResult> pulled = Run(std::move(request), absl::FromChrono(left), nullptr)->Wait();
    const TimePoint now = Now();
    if (absl::IsDeadlineExceeded(pulled.status())) heard = now;
    if (pulled.ok() && context_->synchronous) {
      // A shard may not have published yet what others have: all weights are to be of one version.
      const uint64_t newest =
          std::max(start_step(), *std::max_element(pulled->versions.begin(), pulled->versions.end()));
      if (pulled->version == newest) return pulled;
      version = newest;
      continue;
    }
    const bool passing = absl::IsDeadlineExceeded(pulled.status()) || absl::IsUnavailable(pulled.status());
    if (!passing || now >= deadline || now - heard > ToChrono(options_.connect_timeout)) return pulled;
    Notice(Message(pulled.status()));
  }
}

void ClientImpl::CheckProgress() {
  std::vector<std::weak_ptr<ShardExchange>> running;
  {
    MutexLock lock(mutex_);
    running = running_;
  }
  for (const auto& each : running) {
    if (const auto exchange = each.lock(); exchange != nullptr) exchange->CheckProgress(Now());
  }
  timer_.At(Now() + kProgressEvery, [this] { CheckProgress(); });
}

void ClientImpl::ScheduleHeartbeat() {
  timer_.At(Now() + std::chrono::milliseconds(joined_as_.lease_ms()) / 3, [this] { Heartbeat(); });
}

void ClientImpl::Heartbeat() {
  struct Beat {
    grpc::ClientContext context;
    v1::HeartbeatRequest request;
    v1::HeartbeatReply reply;
  };
  auto beat = std::make_shared<Beat>();
  SetDeadline(beat->context,
              std::min<std::chrono::nanoseconds>(kCallTime, std::chrono::milliseconds(joined_as_.lease_ms())));
  *beat->request.mutable_id() = context_->id;
  beat->request.set_step(step_);
  {
    MutexLock lock(mutex_);
    if (left_) return;
    heartbeating_ = true;
  }
  chief_->async()->Heartbeat(&beat->context, &beat->request, &beat->reply,
                             [this, beat](const grpc::Status& status) { OnHeartbeat(status, beat->reply); });
}

void ClientImpl::OnState(const v1::HeartbeatReply& state) {
  initialise_ = state.initialise();
  {
    MutexLock lock(mutex_);
    if (!all_done_) lead_ = state.lead();
  }
  if (state.phase() == v1::PHASE_FAILED) Fail(absl::AbortedError("the job failed: " + state.failure()));
}

void ClientImpl::OnHeartbeat(const grpc::Status& status, const v1::HeartbeatReply& reply) {
  const bool refused = status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
  const bool ended = status.ok() && reply.phase() != v1::PHASE_GATHERING && reply.phase() != v1::PHASE_RUNNING;
  if (refused) Fail(FromGrpc(status));
  // The watch's state is at least as new.
  if (status.ok() && (ended || !watch_->open())) OnState(reply);
  if (!refused && !ended) ScheduleHeartbeat();
  MutexLock lock(mutex_);
  heartbeating_ = false;
  heartbeat_ended_.NotifyAll();
}

absl::Status ClientImpl::Done() {
  v1::DoneRequest request;
  *request.mutable_id() = context_->id;
  request.set_wait_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.notice_every)));
  for (;;) {
    v1::DoneReply reply;
    const auto call_time = std::chrono::milliseconds(request.wait_ms()) + kDoneMargin;
    PS_RETURN_IF_ERROR(UntilAnswered(
        "waiting for the end", call_time, TimePoint::max(), options_.stop,
        [&](grpc::ClientContext& context, int) { return FromGrpc(chief_->Done(&context, request, &reply)); }));
    if (reply.all_done()) {
      MutexLock lock(mutex_);
      all_done_ = true;
      lead_ = reply.lead();
      return absl::OkStatus();
    }
    Notice(reply.waiting_for());
  }
}

absl::Status ClientImpl::Leave(const std::string& reason) {
  {
    // No heartbeat begins any more, and the last one has ended: it would find the rank gone.
    MutexLock lock(mutex_);
    left_ = true;
    while (heartbeating_) heartbeat_ended_.Wait(mutex_);  // Bounded by the call's deadline.
  }
  v1::LeaveRequest request;
  *request.mutable_id() = context_->id;
  request.set_reason(reason);
  v1::LeaveReply reply;
  if (!reason.empty()) {  // The job failed or continues without this worker; one call is enough.
    grpc::ClientContext context;
    SetDeadline(context, kCallTime);
    return Annotate(FromGrpc(chief_->Leave(&context, request, &reply)), "leaving");
  }
  return UntilAnswered("leaving", kCallTime, TimePoint::max(), {}, [&](grpc::ClientContext& context, int calls) {
    absl::Status status = FromGrpc(chief_->Leave(&context, request, &reply));
    // The first call arrived, and only its answer was lost.
    return calls > 0 && absl::IsFailedPrecondition(status) ? absl::OkStatus() : Annotate(status, "leaving");
  });
}

absl::StatusOr<HashedWeights> ClientImpl::WeightsHash() {
  const HashJob job = {.channels = context_->channels,
                       .slices = context_->plan.slices().size(),
                       .one_version = context_->synchronous,
                       .id = context_->id};
  return HashWeights(job, After(options_.connect_timeout), options_.stop);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Join(const ClientOptions& options, const Layout& layout) {
  auto client = std::make_unique<ClientImpl>(options);
  PS_RETURN_IF_ERROR(client->JoinJob(layout));
  return client;
}

}  // namespace ps
