#include "ps/client.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/endpoint.h"
#include "common/grpc_status.h"
#include "common/status.h"
#include "worker/client/chief_calls.h"
#include "worker/client/exchange.h"
#include "worker/client/grpc_shard_link.h"
#include "worker/client/heartbeats.h"
#include "worker/client/join.h"
#include "worker/client/local_shard_link.h"
#include "worker/client/policy.h"
#include "worker/client/preferred_link.h"
#include "worker/client/running_exchanges.h"
#include "worker/client/tensor_memory.h"
#include "worker/client/watch.h"
#include "worker/client/weights_hash.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kProgressEvery(1);
constexpr absl::Duration kLocalConnect = absl::Seconds(5);
constexpr size_t kMostStaging = 4;                        // Pieces of memory for gradients of the caller's own.
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
      : options_(options), chief_(channel, options) {
    channels_.push_back(channel);
  }
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
  bool lead() const override { return lead_; }
  bool hands_out_runs() const override { return joined_as_.hands_out_runs(); }
  bool should_initialise() const override { return initialise_; }
  // Elsewhere the pin would keep others from going on, and it does not outlast the link.
  bool shares_gradients() const override { return has_shared_memory_; }
  bool can_view() const override { return policy_.exact_versions && context_->links.front()->can_view(); }

  absl::StatusOr<TensorMemory> GradientBuffers() override { return SharedGradientBuffers(); }
  absl::StatusOr<TensorMemory> WeightBuffers() override {
    MutexLock lock(mutex_);
    return Buffers(weight_buffers_);
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
  // Whether there is memory for gradients that servers of this host read.
  absl::Status MakeSpare();
  absl::StatusOr<std::shared_ptr<SharedTensors>> MakeShared() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<TensorMemory> SharedGradientBuffers();
  // Sets where servers of this host find what the request sends.
  void Share(ExchangeRequest& request);
  // The link to this shard, and, where it is not through shared memory, why not. The error is that of
  // --shared_memory=require.
  absl::StatusOr<std::unique_ptr<ShardLink>> MakeLink(uint32_t shard, const v1::ShardInfo& info, std::string* why_not);
  std::shared_ptr<RetryingExchange> Run(ExchangeRequest request, DoneCallback callback = nullptr);
  absl::StatusOr<TensorMemory> Buffers(std::optional<TensorMemory>& buffers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }
  // What exchanges need, from what the chief has answered.
  absl::Status SetUpLinks(const Layout& layout);
  void StartThreads();
  // Ends what is under way and what begins later with this error, unless this worker has left.
  void Fail(const absl::Status& failure) {
    if (!left_) exchanges_.Fail(failure);
  }
  void CheckProgress();
  void OnState(const v1::HeartbeatReply& state);

  const ClientOptions options_;
  ChiefCalls chief_;
  const std::shared_ptr<ExchangeContext> context_ = std::make_shared<ExchangeContext>();
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // By shard; the first is also the chief's.
  v1::JoinReply joined_as_;                               // Constant once joined.
  ModePolicy policy_;                                     // Likewise.
  bool joined_ = false;                                   // Likewise.
  std::atomic<uint64_t> begun_ = 0;                       // Pushes.
  bool has_shared_memory_ = false;                        // Likewise: to one shard at least.
  std::atomic<bool> left_ = false;
  std::atomic<bool> initialise_ = false;
  std::atomic<bool> lead_ = false;
  RunningExchanges exchanges_;

  Mutex mutex_;
  bool all_done_ ABSL_GUARDED_BY(mutex_) = false;  // Done has said who the lead is; what else is told may be older.
  std::optional<TensorMemory> gradient_buffers_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SharedTensors> shared_gradients_ ABSL_GUARDED_BY(mutex_);  // What they are in, if they are shared.
  std::shared_ptr<SharedTensors> spare_ ABSL_GUARDED_BY(mutex_);  // Made first of all, to see whether there is memory.
  std::vector<std::shared_ptr<SharedTensors>> staging_ ABSL_GUARDED_BY(mutex_);  // For gradients that are not.
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
  if (joined_ && !left_) (void)Leave("the worker ended without leaving");
  watch_.reset();
  timer_.Stop();  // Before what its calls use.
}

absl::Status ClientImpl::JoinJob(const Layout& layout) {
  absl::StatusOr<v1::JoinReply> joined = ps::JoinJob(chief_, options_, layout);
  if (!joined.ok()) return joined.status();
  joined_as_ = *std::move(joined);
  joined_ = true;
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
  context_->connect_timeout = ToChrono(options_.connect_timeout);
  context_->notice_every = ToChrono(options_.notice_every);
  context_->on_notice = options_.on_notice;
  if (options_.sender_thread) context_->sender = std::make_unique<SenderThread>();
  std::vector<std::string> over_grpc;
  for (const v1::ShardInfo& info : joined_as_.shards()) {
    const auto shard = static_cast<uint32_t>(context_->links.size());
    std::string why_not;
    absl::StatusOr<std::unique_ptr<ShardLink>> link = MakeLink(shard, info, &why_not);
    if (!link.ok()) return link.status();
    context_->links.push_back(*std::move(link));
    if (!why_not.empty()) over_grpc.push_back(absl::StrCat("shard ", shard, " over gRPC (", why_not, ")"));
  }
  has_shared_memory_ = over_grpc.size() < context_->links.size();
  std::string links = absl::StrJoin(over_grpc, ", ");
  if (has_shared_memory_) {
    absl::StrAppend(&links, links.empty() ? "all shards" : "; the others", " through shared memory");
  }
  Notice(absl::StrCat("exchanging with ", links));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ShardLink>> ClientImpl::MakeLink(uint32_t shard, const v1::ShardInfo& info,
                                                                std::string* why_not) {
  // The chief is reached as the user said, the others as they advertise.
  const std::string address = shard == 0 ? options_.server : info.address();
  if (shard > 0) channels_.push_back(MakeChannel(address, grpc::InsecureChannelCredentials(), 0));
  auto remote = MakeGrpcShardLink(channels_[shard], address, shard, context_->plan, joined_as_.id());
  if (options_.shared_memory == "off") {
    *why_not = "--shared_memory=off";
    return remote;
  }
  absl::Status connected = absl::UnavailableError("the server offers none");
  if (!info.local_socket().empty()) connected = MakeSpare();
  if (!info.local_socket().empty() && connected.ok()) {
    const absl::Duration longest = std::min(options_.connect_timeout, kLocalConnect);
    const auto on_lost = [shard, notice = options_.on_notice](const std::string& text) {
      if (notice) notice(absl::StrCat("shard ", shard, ": ", text));
    };
    absl::StatusOr<std::unique_ptr<ShardLink>> local = ConnectLocally({.socket = info.local_socket(),
                                                                       .address = address,
                                                                       .shard = shard,
                                                                       .plan = &context_->plan,
                                                                       .id = joined_as_.id(),
                                                                       .on_lost = on_lost},
                                                                      After(longest));
    if (local.ok()) {
      return PreferLocal(*std::move(local), std::move(remote));
    }
    // Nobody is there: the server is on another host, or in another network namespace.
    connected =
        absl::IsUnavailable(local.status()) ? absl::UnavailableError("not reachable on this host") : local.status();
  }
  *why_not = Message(connected);
  if (options_.shared_memory != "require") return remote;
  return absl::FailedPreconditionError(
      absl::StrCat("--shared_memory=require: shard ", shard, " at ", address, ": ", *why_not));
}

absl::Status ClientImpl::MakeSpare() {
  MutexLock lock(mutex_);
  if (spare_ != nullptr) return absl::OkStatus();
  absl::StatusOr<std::shared_ptr<SharedTensors>> made = SharedTensors::Create(context_->plan.layout());
  if (!made.ok()) return made.status();
  spare_ = *std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<SharedTensors>> ClientImpl::MakeShared() {
  if (spare_ != nullptr) return std::exchange(spare_, nullptr);
  return SharedTensors::Create(context_->plan.layout());
}

void ClientImpl::StartThreads() {
  on_stop_.emplace(options_.stop, [this] { Fail(absl::CancelledError("stopped")); });
  const auto on_refused = [this](const absl::Status& status) { Fail(status); };
  watch_ = std::make_unique<ChiefWatch>(
      chief_.stub(), timer_, joined_as_.id(),
      ChiefCallbacks{.on_state = [this](const v1::HeartbeatReply& state) { OnState(state); },
                     .on_refused = on_refused});
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
  initialise_ = state.initialise();
  {
    MutexLock lock(mutex_);
    if (!all_done_) lead_ = state.lead();
  }
  if (state.phase() == v1::PHASE_FAILED) Fail(absl::AbortedError("the job failed: " + state.failure()));
}

absl::StatusOr<TensorMemory> ClientImpl::Buffers(std::optional<TensorMemory>& buffers) {
  if (buffers.has_value()) return *buffers;
  absl::StatusOr<TensorMemory> made = AllocateTensors(context_->plan.layout());
  if (made.ok()) buffers = *made;
  return made;
}

absl::StatusOr<TensorMemory> ClientImpl::SharedGradientBuffers() {
  MutexLock lock(mutex_);
  if (!has_shared_memory_ || gradient_buffers_.has_value()) return Buffers(gradient_buffers_);
  absl::StatusOr<std::shared_ptr<SharedTensors>> made = MakeShared();
  if (!made.ok()) return Buffers(gradient_buffers_);  // What is pushed is copied, or goes over gRPC.
  shared_gradients_ = *made;
  gradient_buffers_ = TensorMemory{
      .tensors = (*made)->tensors(), .owner = *made, .block = std::as_writable_bytes((*made)->memory().bytes())};
  return *gradient_buffers_;
}

void ClientImpl::Share(ExchangeRequest& request) {
  if (!has_shared_memory_ || request.sends_no_slices()) return;
  MutexLock lock(mutex_);
  if (shared_gradients_ != nullptr && !shared_gradients_->detached() && shared_gradients_->Holds(request.out)) {
    request.shared = shared_gradients_;
    return;
  }
  // Of earlier pushes; one that is held by an exchange is still being read.
  std::erase_if(staging_, [](const auto& each) { return each->detached(); });
  const auto free =
      std::find_if(staging_.begin(), staging_.end(), [](const auto& each) { return each.use_count() == 1; });
  if (free != staging_.end()) {
    request.shared = *free;
  } else if (staging_.size() >= kMostStaging) {
    return;  // Over gRPC: the caller keeps many exchanges.
  } else if (absl::StatusOr<std::shared_ptr<SharedTensors>> made = MakeShared(); made.ok()) {
    request.shared = staging_.emplace_back(*std::move(made));
  }
  request.staged = request.shared != nullptr;
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
  Share(request);
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
    if (!passing || now >= deadline || now - heard > ToChrono(options_.connect_timeout)) return pulled;
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
    PS_RETURN_IF_ERROR(chief_.UntilAnswered(
        {.what = "taking a run of samples", .call_time = wait + kAnswerMargin, .stop = options_.stop},
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
    PS_RETURN_IF_ERROR(chief_.UntilAnswered({.what = "waiting for the end",
                                             .call_time = std::chrono::milliseconds(request.wait_ms()) + kAnswerMargin,
                                             .stop = options_.stop},
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
  left_ = true;
  // The last one has ended: it would find the rank gone.
  if (heartbeats_ != nullptr) heartbeats_->Stop();
  v1::LeaveRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_reason(reason);
  const auto leave = [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int earlier) {
    v1::LeaveReply reply;
    const absl::Status status = FromGrpc(chief.Leave(&context, request, &reply));
    // The first call arrived, and only its answer was lost.
    return earlier > 0 && absl::IsFailedPrecondition(status) ? absl::OkStatus() : Annotate(status, "leaving");
  };
  // With a reason the job failed or continues without this worker; one call is enough.
  if (!reason.empty()) return chief_.Once(kControlCallTime, leave);
  return chief_.UntilAnswered({.what = "leaving", .call_time = kControlCallTime}, leave);
}

absl::StatusOr<HashedWeights> ClientImpl::WeightsHash() {
  const HashJob job = {.channels = channels_,
                       .slices = context_->plan.slices().size(),
                       .one_version = synchronous(),
                       .id = joined_as_.id()};
  return HashWeights(job, After(options_.connect_timeout), options_.stop);
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
