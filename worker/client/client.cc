#include "ps/client.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "worker/client/chief_calls.h"
#include "worker/client/exchange.h"
#include "worker/client/fencing.h"
#include "worker/client/gradient_memory.h"
#include "worker/client/heartbeats.h"
#include "worker/client/join.h"
#include "worker/client/policy.h"
#include "worker/client/running_exchanges.h"
#include "worker/client/shard_links.h"
#include "worker/client/tensor_memory.h"
#include "worker/client/watch.h"
#include "worker/client/weights_hash.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kProgressEvery(1);
constexpr std::chrono::milliseconds kAnswerMargin(5000);  // For the answer of a call that waits at the chief.

TimePoint After(absl::Duration time) { return Now() + ToChrono(time); }

ExchangeRequest PullRequest(const MutableTensors& weights, std::optional<uint64_t> version,
                            std::optional<uint64_t> step, TimePoint give_up = TimePoint::max()) {
  ExchangeRequest request;
  request.kind = CallKind::kPull;
  request.version = version;
  request.step = step;
  request.in = weights;
  request.give_up = give_up;
  return request;
}

class ClientImpl final : public Client {
 public:
  ClientImpl(const ClientOptions& options, const std::shared_ptr<grpc::Channel>& channel)
      : options_(options), chief_(channel, options), channels_({channel}) {}
  ~ClientImpl() override;

  absl::Status JoinJob(const Layout& layout);

  uint32_t rank() const override { return joined_as_.id().rank(); }
  uint64_t incarnation() const override { return joined_as_.id().incarnation(); }
  uint64_t generation() const override { return joined_as_.id().generation(); }
  uint32_t num_workers() const override { return joined_as_.num_workers(); }
  uint32_t num_shards() const override { return context_->plan.num_shards(); }
  const std::string& name() const override { return joined_as_.name(); }
  const std::string& mode() const override { return joined_as_.mode(); }
  bool synchronous() const override { return joined_as_.synchronous(); }
  const ModePolicy& policy() const override { return policy_; }
  uint64_t start_step() const override { return joined_as_.start_step(); }
  const std::string& replaced() const override { return joined_as_.replaced(); }
  absl::Duration server_timeout() const override { return absl::Milliseconds(joined_as_.server_timeout_ms()); }
  uint64_t restored_version() const override { return joined_as_.restored_version(); }
  bool rolled_back() const override { return rolled_back_; }
  bool lead() const override { return lead_; }
  bool hands_out_runs() const override { return joined_as_.hands_out_runs(); }
  bool should_initialise() const override { return initialise_; }
  // Elsewhere the pin would keep others from going on, and it does not outlast the link.
  bool shares_gradients() const override { return has_shared_memory_; }
  bool can_view() const override { return policy_.exact_versions && context_->links.front()->can_view(); }

  absl::StatusOr<TensorMemory> GradientBuffers() override { return gradients_.Buffers(has_shared_memory_); }
  absl::StatusOr<TensorMemory> WeightBuffers() override {
    MutexLock lock(mutex_);
    if (weight_buffers_.has_value()) return *weight_buffers_;
    absl::StatusOr<TensorMemory> made = AllocateTensors(context_->plan.layout());
    if (made.ok()) weight_buffers_ = *made;
    return made;
  }

  absl::Status Initialise(const ConstTensors& values) override {
    ExchangeRequest request;
    request.kind = CallKind::kInit;
    request.out = values;
    request.give_up = After(options_.start_timeout);
    return Run(std::move(request))->Wait().status();
  }
  absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) override;

  absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& gradients) override {
    return StartPushPull(push, gradients, {}, false, nullptr)->Wait();
  }
  absl::StatusOr<ExchangeResult> Pull(const MutableTensors& weights, std::optional<uint64_t> version,
                                      std::optional<uint64_t> step) override {
    return Run(PullRequest(weights, version, step))->Wait();
  }
  absl::StatusOr<ExchangeResult> PushPull(const PushInfo& push, const ConstTensors& gradients,
                                          const MutableTensors& weights) override {
    return StartPushPull(push, gradients, weights, false, nullptr)->Wait();
  }
  std::shared_ptr<Exchange> StartPushPull(const PushInfo& push, const ConstTensors& gradients,
                                          const MutableTensors& weights, bool deferred,
                                          DoneCallback callback) override {
    return Start(push, gradients, weights, deferred, /*view=*/false, std::move(callback));
  }
  std::shared_ptr<Exchange> StartPushView(const PushInfo& push, const ConstTensors& gradients,
                                          const MutableTensors& weights, bool deferred) override {
    return Start(push, gradients, weights, deferred, /*view=*/true, nullptr);
  }

  absl::StatusOr<TakenRun> TakeRun(const RunRequest& request) override;
  void SetBusy(const std::string& what) override { heartbeats_->SetBusy(what); }
  absl::Status Done(bool counts_as_empty) override;
  absl::Status Leave(const std::string& reason) override;
  absl::StatusOr<HashedWeights> WeightsHash() override;

 private:
  std::shared_ptr<Exchange> Start(const PushInfo& push, const ConstTensors& gradients, const MutableTensors& weights,
                                  bool deferred, bool view, DoneCallback callback);
  std::shared_ptr<RetryingExchange> Run(ExchangeRequest request, DoneCallback callback = nullptr);
  void Notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }
  // What exchanges need, from what the chief has answered.
  absl::Status SetUpLinks(const Layout& layout);
  void StartThreads();
  // The job can be rolled back, and goes on then.
  bool recovers() const { return joined_as_.server_timeout_ms() > 0; }
  // Makes a call to the chief again until it is answered, or this client is over.
  absl::Status AskChief(ChiefCalls::Wait wait, const ChiefCalls::Call& call);
  // A server does not take this worker for a member: asks the chief whether that is because another generation runs.
  void AskGeneration();
  // The error of a call that ended so: if this client was rolled back, it is that.
  absl::Status Ended(const absl::Status& status);
  // Ends what is under way and what begins later with this error. Only the first call counts.
  void Fail(const absl::Status& failure, bool rolled_back = false);
  void OnGeneration(uint64_t generation);
  void OnFenced(uint64_t generation);
  void CheckProgress();
  void OnState(const v1::HeartbeatReply& state);

  const ClientOptions options_;
  ChiefCalls chief_;
  const std::shared_ptr<ExchangeContext> context_ = std::make_shared<ExchangeContext>();
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // By shard, once joined; the first is also the chief's.
  v1::JoinReply joined_as_;                               // Constant once joined.
  ModePolicy policy_;                                     // Likewise.
  bool joined_ = false;                                   // Likewise.
  std::atomic<uint64_t> begun_ = 0;                       // Pushes.
  bool has_shared_memory_ = false;                        // Likewise: to one shard at least.
  std::atomic<bool> left_ = false;
  std::atomic<bool> rolled_back_ = false;
  std::stop_source over_;  // It is rolled back, or the user wants to stop.
  std::atomic<bool> initialise_ = false;
  std::atomic<bool> lead_ = false;
  RunningExchanges exchanges_;
  GradientMemory gradients_ = GradientMemory(context_->plan.layout());

  Mutex mutex_;
  bool all_done_ ABSL_GUARDED_BY(mutex_) = false;  // Done has said who the lead is; what else is told may be older.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);   // What has ended this client.
  std::optional<TensorMemory> weight_buffers_ ABSL_GUARDED_BY(mutex_);

  ThreadTimer timer_;
  std::unique_ptr<Heartbeats> heartbeats_;
  std::unique_ptr<ChiefWatch> watch_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

ClientImpl::~ClientImpl() {
  on_stop_.reset();
  exchanges_.EndAll(absl::CancelledError("the client is shutting down"));
  context_->sender = nullptr;  // Here, not where the last exchange ends, which may be its own thread.
  if (joined_ && !left_ && !rolled_back_) (void)Leave("the worker ended without leaving");
  if (heartbeats_ != nullptr) heartbeats_->Stop();
  watch_.reset();
  timer_.Stop();  // Before what its calls use.
}

absl::Status ClientImpl::JoinJob(const Layout& layout) {
  absl::StatusOr<v1::JoinReply> joined = ps::JoinJob(chief_, options_, layout);
  if (!joined.ok()) return joined.status();
  joined_as_ = *std::move(joined);
  joined_ = true;
  if (recovers()) chief_.SetPatience({.longest = ToChrono(server_timeout()), .for_restart = true});
  if (joined_as_.slice_elements() != kSliceElements) {
    const std::string problem = absl::StrCat("the server cuts slices of ", joined_as_.slice_elements(),
                                             " elements; this client of ", kSliceElements);
    (void)Leave(problem);
    return absl::FailedPreconditionError(problem);
  }
  absl::StatusOr<ModePolicy> policy = PolicyOf(joined_as_);
  if (!policy.ok()) {
    (void)Leave(Message(policy.status()));
    return policy.status();
  }
  policy_ = *std::move(policy);
  if (const absl::Status links = SetUpLinks(layout); !links.ok()) {
    (void)Leave(Message(links));
    return links;
  }
  initialise_ = joined_as_.initialise();
  lead_ = joined_as_.lead();
  if (!replaced().empty()) Notice(absl::StrCat("this worker replaces ", replaced(), " as rank ", rank()));
  StartThreads();
  return absl::OkStatus();
}

absl::Status ClientImpl::SetUpLinks(const Layout& layout) {
  context_->plan = SlicePlan(layout, static_cast<uint32_t>(joined_as_.shards_size()));
  context_->rank = rank();
  context_->incarnation = incarnation();
  context_->exact_versions = policy_.exact_versions;
  context_->generation = generation();
  context_->patience = {.longest = ToChrono(recovers() ? server_timeout() : options_.connect_timeout),
                        .for_restart = recovers()};
  context_->notice_every = ToChrono(options_.notice_every);
  context_->on_notice = options_.on_notice;
  if (recovers()) context_->on_fenced = [this](uint64_t running) { OnFenced(running); };
  if (options_.sender_thread) context_->sender = std::make_unique<SenderThread>();
  absl::StatusOr<ShardLinks> made =
      LinkShards(options_, joined_as_, context_->plan, channels_.front(), [this] { return gradients_.MakeSpare(); });
  if (!made.ok()) return made.status();
  channels_ = std::move(made->channels);
  context_->links = std::move(made->links);
  has_shared_memory_ = made->has_shared_memory;
  Notice(absl::StrCat("exchanging with ", made->text));
  return absl::OkStatus();
}

void ClientImpl::StartThreads() {
  on_stop_.emplace(options_.stop, [this] {
    Fail(absl::CancelledError("stopped"));
    over_.request_stop();
  });
  const auto on_refused = [this](const absl::Status& status) { Fail(status); };
  // A stream does not say which generation runs; the answer to a heartbeat does.
  const auto ask = [this] { heartbeats_->BeatNow(); };
  const auto on_watch_refused = [this, ask](const absl::Status& status) {
    recovers() && IsFenced(status) ? ask() : Fail(status);
  };
  watch_ = std::make_unique<ChiefWatch>(
      chief_.stub(), timer_, joined_as_.id(),
      ChiefCallbacks{.on_state = [this](const v1::HeartbeatReply& state) { OnState(state); },
                     .on_refused = on_watch_refused,
                     .on_closed = ask});
  // The state on the stream is at least as new.
  const auto on_beat = [this](const v1::HeartbeatReply& state) {
    if (JobIsOver(state) || !watch_->open()) OnState(state);
  };
  heartbeats_ = std::make_unique<Heartbeats>(chief_.stub(), timer_, joined_as_.id(),
                                             std::chrono::milliseconds(joined_as_.lease_ms()),
                                             ChiefCallbacks{.on_state = on_beat, .on_refused = on_refused});
  heartbeats_->SetStep(start_step());
  watch_->Start();
  heartbeats_->Start();
  CheckProgress();
}

void ClientImpl::CheckProgress() {
  exchanges_.CheckProgress();
  timer_.At(timer_.now() + kProgressEvery, [this] { CheckProgress(); });
}

void ClientImpl::OnState(const v1::HeartbeatReply& state) {
  if (state.generation() != 0 && state.generation() != generation()) return OnGeneration(state.generation());
  initialise_ = state.initialise();
  {
    MutexLock lock(mutex_);
    if (!all_done_) lead_ = state.lead();
  }
  if (state.phase() == v1::PHASE_FAILED) Fail(absl::AbortedError("the job failed: " + state.failure()));
}

void ClientImpl::OnGeneration(uint64_t running) {
  const std::string what =
      absl::StrCat("generation ", running, " of job ", options_.job, " is running, not generation ", generation());
  if (!recovers()) return Fail(absl::FailedPreconditionError("fenced: " + what));
  Fail(absl::FailedPreconditionError(absl::StrCat(
           "rank ", rank(), ": the job was rolled back to an earlier checkpoint (", what, "); make a new client")),
       /*rolled_back=*/true);
}

// Called by an exchange, which must not be ended here.
void ClientImpl::OnFenced(uint64_t running) {
  if (running > generation()) {
    timer_.At(timer_.now(), [this, running] { OnGeneration(running); });
  } else {
    heartbeats_->BeatNow();
  }
}

void ClientImpl::Fail(const absl::Status& failure, bool rolled_back) {
  {
    MutexLock lock(mutex_);
    if ((left_ && !rolled_back) || !failure_.ok()) return;
    failure_ = failure;
    rolled_back_ = rolled_back;
  }
  exchanges_.Fail(failure);
  if (rolled_back) over_.request_stop();
}

absl::Status ClientImpl::Ended(const absl::Status& status) {
  MutexLock lock(mutex_);
  return !status.ok() && rolled_back_ ? failure_ : status;
}

absl::Status ClientImpl::AskChief(ChiefCalls::Wait wait, const ChiefCalls::Call& call) {
  wait.stop = over_.get_token();
  const absl::Status status = chief_.UntilAnswered(wait, call);
  if (IsFenced(status)) AskGeneration();
  return Ended(status);
}

void ClientImpl::AskGeneration() {
  if (!recovers() || rolled_back_) return;
  v1::HeartbeatRequest request;
  *request.mutable_id() = joined_as_.id();
  v1::HeartbeatReply state;
  const absl::Status answered = chief_.UntilAnswered(
      {.what = "asking which generation runs", .call_time = kControlCallTime, .stop = over_.get_token()},
      [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
        return FromGrpc(chief.Heartbeat(&context, request, &state));
      });
  if (answered.ok() && state.generation() != 0) OnGeneration(state.generation());
}

std::shared_ptr<RetryingExchange> ClientImpl::Run(ExchangeRequest request, DoneCallback callback) {
  auto exchange = std::make_shared<RetryingExchange>(context_, timer_, std::move(request), std::move(callback));
  exchanges_.Begin(exchange);
  return exchange;
}

std::shared_ptr<Exchange> ClientImpl::Start(const PushInfo& push, const ConstTensors& gradients,
                                            const MutableTensors& weights, bool deferred, bool view,
                                            DoneCallback callback) {
  const bool pushes = !gradients.empty();
  const bool pulls = !weights.empty();
  if (pushes) heartbeats_->SetStep(push.step);
  ExchangeRequest request;
  request.kind = !pushes ? CallKind::kPull : pulls ? CallKind::kPushPull : CallKind::kPush;
  request.push = push;
  if (pushes) request.begun = ++begun_;
  request.out = gradients;
  request.in = weights;
  request.deferred = deferred;
  request.view = view && can_view();
  request.empty_contributions = policy_.empty_contributions;
  if (has_shared_memory_ && !request.sends_no_slices()) gradients_.Share(request);
  return Run(std::move(request), std::move(callback));
}

absl::StatusOr<ExchangeResult> ClientImpl::Start(const ConstTensors& initial_values, const MutableTensors& weights) {
  const TimePoint deadline = After(options_.start_timeout);
  TimePoint heard = Now();
  std::optional<uint64_t> version;  // The newest, as long as there is nothing to tell which one.
  for (;;) {
    if (initialise_) PS_RETURN_IF_ERROR(Initialise(initial_values));
    // Short waits, so that a grant to initialise that passes on is seen.
    const TimePoint wait_end = std::min(deadline, Now() + ToChrono(options_.notice_every));
    absl::StatusOr<ExchangeResult> pulled = Run(PullRequest(weights, version, start_step(), wait_end))->Wait();
    const TimePoint now = Now();
    if (absl::IsDeadlineExceeded(pulled.status())) heard = now;
    if (pulled.ok() && synchronous()) {
      // A shard may not have published yet what others have: all weights are to be of one version.
      const uint64_t newest =
          std::max(start_step(), *std::max_element(pulled->versions.begin(), pulled->versions.end()));
      if (pulled->version == newest) return pulled;
      version = newest;
      continue;
    }
    // The others need not wait for this worker where versions are not exact: the one asked for may be gone already.
    if (absl::IsFailedPrecondition(pulled.status()) && !policy().exact_versions &&
        std::exchange(version, std::nullopt).has_value() && now < deadline) {
      continue;
    }
    const bool passing = absl::IsDeadlineExceeded(pulled.status()) || absl::IsUnavailable(pulled.status());
    const Patience& patience = context_->patience;
    if (!passing || now >= deadline) return pulled;
    if (now - heard > patience.longest) {
      return patience.for_restart
                 ? absl::UnavailableError(absl::StrCat(Message(pulled.status()), " (", patience.flag(), ")"))
                 : pulled;
    }
    Notice(Message(pulled.status()));
  }
}

absl::StatusOr<TakenRun> ClientImpl::TakeRun(const RunRequest& request) {
  const TimePoint wait_end = request.wait == absl::InfiniteDuration() ? TimePoint::max() : After(request.wait);
  v1::TakeRunRequest asked;
  *asked.mutable_id() = joined_as_.id();
  asked.set_number(request.number);
  asked.set_finished(request.finished);
  asked.set_samples(request.samples);
  asked.set_batch_size(request.batch_size);
  asked.set_runs(request.runs);
  for (;;) {
    const auto left = std::max<std::chrono::nanoseconds>(wait_end - Now(), {});
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::min(left, ToChrono(options_.notice_every)));
    asked.set_wait_ms(static_cast<uint32_t>(wait.count()));
    v1::TakeRunReply reply;
    PS_RETURN_IF_ERROR(AskChief({.what = "taking a run of samples", .call_time = wait + kAnswerMargin},
                                [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
                                  return FromGrpc(chief.TakeRun(&context, asked, &reply));
                                }));
    if (reply.outcome() == v1::TakeRunReply::RUN)
      return TakenRun{.outcome = TakenRun::Outcome::kRun, .run = reply.run()};
    if (reply.outcome() == v1::TakeRunReply::DONE) return TakenRun{.outcome = TakenRun::Outcome::kDone};
    const bool has_open = request.finished + 1 < request.number;
    if (has_open || Now() >= wait_end) return TakenRun{.outcome = TakenRun::Outcome::kWait};
    Notice(reply.waiting_for());
  }
}

absl::Status ClientImpl::Done(bool counts_as_empty) {
  v1::DoneRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_counts_as_empty(counts_as_empty);
  request.set_wait_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.notice_every)));
  for (;;) {
    v1::DoneReply reply;
    PS_RETURN_IF_ERROR(AskChief(
        {.what = "waiting for the end", .call_time = std::chrono::milliseconds(request.wait_ms()) + kAnswerMargin},
        [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
          return FromGrpc(chief.Done(&context, request, &reply));
        }));
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
  if (rolled_back_) return Ended(absl::UnknownError(""));  // Nobody knows this member any more.
  left_ = true;
  // The last one has ended: it would find the rank gone.
  if (heartbeats_ != nullptr) heartbeats_->Stop();
  v1::LeaveRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_reason(reason);
  bool fenced = false;
  const auto leave = [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int earlier) {
    v1::LeaveReply reply;
    const absl::Status status = FromGrpc(chief.Leave(&context, request, &reply));
    fenced = IsFenced(status);
    // The first call arrived, and only its answer was lost.
    return earlier > 0 && absl::IsFailedPrecondition(status) ? absl::OkStatus() : Annotate(status, "leaving");
  };
  // With a reason the job failed or continues without this worker; one call is enough.
  if (!reason.empty()) return chief_.Once(kControlCallTime, leave);
  const absl::Status left = chief_.UntilAnswered({.what = "leaving", .call_time = kControlCallTime}, leave);
  // Or it came too late: the job has to be brought to its end once more.
  if (fenced) AskGeneration();
  return rolled_back_ ? Ended(absl::UnknownError("")) : left;
}

absl::StatusOr<HashedWeights> ClientImpl::WeightsHash() {
  const HashJob job = {.channels = channels_,
                       .slices = context_->plan.slices().size(),
                       .one_version = synchronous(),
                       .id = joined_as_.id()};
  const absl::Duration longest = std::max(options_.connect_timeout, server_timeout());
  absl::StatusOr<HashedWeights> hashed = HashWeights(job, After(longest), over_.get_token());
  if (IsFenced(hashed.status())) AskGeneration();
  return hashed.ok() ? hashed : Ended(hashed.status());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Join(const ClientOptions& options, const Layout& layout) {
  PS_RETURN_IF_ERROR(ValidateClientOptions(options));
  PS_RETURN_IF_ERROR(ValidateLayout(layout));
  if (options.stop.stop_requested()) return absl::CancelledError("joining: stopped");
  auto client =
      std::make_unique<ClientImpl>(options, MakeChannel(options.server, grpc::InsecureChannelCredentials(), 0));
  PS_RETURN_IF_ERROR(client->JoinJob(layout));
  return client;
}

}  // namespace ps
