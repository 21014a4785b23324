#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/data_summary.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/status.h"
#include "ps/client.h"
#include "worker/client/chief_calls.h"
#include "worker/client/exchange.h"
#include "worker/client/gradient_memory.h"
#include "worker/client/heartbeats.h"
#include "worker/client/join.h"
#include "worker/client/refused_runs.h"
#include "worker/client/slow_steps.h"
#include "worker/client/timer.h"
#include "worker/link/pulled_state.h"
#include "worker/link/shard_links.h"
#include "worker/link/tensor_memory.h"
#include "worker/link/weights_hash.h"

namespace ps {
namespace {

constexpr std::chrono::seconds kProgressEvery(1);
constexpr std::chrono::seconds kAskTime(2);               // Where the shards are.
constexpr std::chrono::milliseconds kAnswerMargin(5000);  // For the answer of a call that waits at the chief.
constexpr std::chrono::milliseconds kBehindPause(20);
constexpr size_t kMaxGroupBytes = 32 << 10;  // Of PushInfo::groups: each message of a push has them (ps.proto).
constexpr size_t kMaxReduced = 4096;         // Numbers of one reduction (ReduceRequest).

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
      : options_(options), chief_(channel, options) {}
  ~ClientImpl() override;

  absl::Status JoinJob(const Layout& layout);

  uint32_t rank() const override { return joined_as_.id().rank(); }
  uint64_t incarnation() const override { return joined_as_.id().incarnation(); }
  uint64_t generation() const override { return joined_as_.id().generation(); }
  // The first checkpoint is complete before the job runs.
  KnownCheckpoints known_checkpoints() const override {
    if ((ran_ || restored_version() > 0) && !joined_as_.checkpoint_dir().empty()) {
      return {.dir = joined_as_.checkpoint_dir(),
              .generation = generation(),
              .version = std::max<uint64_t>(checkpoint_version_, restored_version())};
    }
    return {.dir = options_.known_dir, .generation = options_.known_generation, .version = options_.known_version};
  }
  uint32_t num_workers() const override { return joined_as_.num_workers(); }
  uint32_t num_shards() const override { return context_->plan.num_shards(); }
  const std::string& name() const override { return joined_as_.name(); }
  const std::string& mode() const override { return joined_as_.mode(); }
  bool synchronous() const override { return joined_as_.synchronous(); }
  const ModePolicy& policy() const override { return policy_; }
  uint64_t start_step() const override { return joined_as_.start_step() + (begun_empty_ ? 1 : 0); }
  bool starts_with_others() const override { return joined_as_.starts_with_others(); }
  const std::string& replaced() const override { return joined_as_.replaced(); }
  absl::Duration server_timeout() const override { return absl::Milliseconds(joined_as_.server_timeout_ms()); }
  Resized resized() const override {
    return {.step = joined_as_.resized_step(), .samples = joined_as_.resized_samples()};
  }
  uint64_t restored_version() const override { return joined_as_.restored_version(); }
  std::optional<DataSummary> data_of_all() const override { return data_of_all_; }
  bool rolled_back() const override { return rolled_back_; }
  bool fenced() const override { return fenced_; }
  bool lead() const override { return lead_; }
  bool hands_out_runs() const override { return joined_as_.hands_out_runs(); }
  bool should_initialise() const override { return initialise_; }
  bool shares_gradients() const override { return has_shared_memory_ && context_->wire.pushes.is_float32(); }
  bool can_view() const override {
    return context_->wire.weights == WireType::kFloat32 && context_->links.front()->can_view();
  }

  absl::StatusOr<TensorMemory> GradientBuffers() override { return gradients_.Buffers(shares_gradients()); }
  absl::StatusOr<TensorMemory> WeightBuffers() override {
    MutexLock lock(mutex_);
    if (weight_buffers_.has_value()) return *weight_buffers_;
    absl::StatusOr<TensorMemory> made = AllocateTensors(context_->plan.layout());
    if (made.ok()) weight_buffers_ = *made;
    return made;
  }

  absl::StatusOr<std::optional<RoundedMemory>> RoundedGradients() override;

  absl::Status Initialise(const ConstTensors& values) override;
  absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) override {
    return Start(initial_values, /*initial_state=*/nullptr, weights);
  }
  absl::StatusOr<ExchangeResult> StartWithState(const ConstTensors& initial_values, const OptimizerState& initial_state,
                                                const MutableTensors& weights) override {
    return Start(initial_values, &initial_state, weights);
  }

  absl::StatusOr<ExchangeResult> Push(const PushInfo& push, const ConstTensors& gradients) override {
    return StartPushPull(push, gradients, {}, false, nullptr)->Wait();
  }
  absl::StatusOr<ExchangeResult> Pull(const MutableTensors& weights, std::optional<uint64_t> version,
                                      std::optional<uint64_t> step) override;
  absl::StatusOr<ExchangeResult> PullFloat32(const MutableTensors& weights) override;
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
  absl::StatusOr<Reduced> Reduce(const std::string& name, Reduction operation, std::span<const double> values) override;
  absl::Status CountLocalStep() override;
  void SetBusy(const std::string& what) override { heartbeats_->SetBusy(what); }
  void ReportStep(const StepReport& step) override;
  void ReportEvaluation(const EvaluationReport& evaluation) override { heartbeats_->AddEvaluation(evaluation); }
  void ReportDevice(const std::string& device) override { heartbeats_->SetDevice(device); }
  absl::Status Done(bool counts_as_empty) override;
  absl::Status Leave(const std::string& reason) override;
  absl::StatusOr<HashedWeights> WeightsHash() override;
  absl::StatusOr<OptimizerState> PullState(std::optional<uint64_t> version) override;

 private:
  static TimePoint After(absl::Duration time) { return Now() + ToChrono(time); }
  absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const OptimizerState* initial_state,
                                       const MutableTensors& weights);
  std::shared_ptr<Exchange> Start(const PushInfo& push, const ConstTensors& gradients, const MutableTensors& weights,
                                  bool deferred, bool view, DoneCallback callback);
  // An empty contribution to the step that the others are at, once it is part of a version.
  absl::Status PushNothing();
  // Begins it, unless this client has ended, the request is wrong, or could not be made (`problem`): then it ends with
  // that error.
  std::shared_ptr<RetryingExchange> Run(ExchangeRequest request, DoneCallback callback = nullptr,
                                        absl::Status problem = absl::OkStatus());
  // The exchanges in progress. They are their callers' and their calls'; here they are only known.
  std::vector<std::shared_ptr<RetryingExchange>> Running();
  // Says where what the request sends is found as the job sends it, if that is not where the caller has it.
  absl::Status StageGradients(ExchangeRequest& request);
  void Notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }
  // Takes what the chief has answered, unless it cannot be: then the worker leaves with this error.
  absl::Status TakeAnswer(const Layout& layout);
  // What exchanges need, from what the chief has answered.
  absl::Status SetUpLinks(const Layout& layout);
  // Links to where `joined_as_` says that the shards are. No exchange may be under way.
  absl::Status LinkAgain();
  // Until the job has begun a shard may be started again at another address: asks the chief, and is true if there is a
  // shard that has moved and is linked now. No exchange may be under way.
  bool FollowShards();
  // Ends when this time is over, but for what moves.
  absl::Status Initialise(const ConstTensors& values, const OptimizerState* state, TimePoint give_up);
  absl::Status TakeDataOfAll();
  absl::Status TakeWireFormat();
  void StartThreads();
  // The job can be rolled back, and goes on then.
  bool recovers() const { return joined_as_.server_timeout_ms() > 0; }
  // Makes a call to the chief again until it is answered, or this client is over.
  absl::Status AskChief(ChiefCalls::Wait wait, const ChiefCalls::Call& call);
  // A server does not take this worker for a member: asks the chief whether that is because another generation runs.
  void AskWhyFenced();
  // The chief has refused a heartbeat or the stream.
  void OnRefused(const absl::Status& status);
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
  std::vector<std::shared_ptr<grpc::Channel>> channels_;  // By shard, once joined.
  v1::JoinReply joined_as_;                               // Constant once joined, but for addresses (FollowShards).
  ModePolicy policy_;                                     // Constant once joined, as are the next three.
  std::optional<DataSummary> data_of_all_;
  bool joined_ = false;
  bool has_shared_memory_ = false;       // One shard at least has it.
  std::atomic<uint64_t> begun_ = 0;      // Pushes.
  std::atomic<uint64_t> next_step_ = 0;  // The one after the highest that a push was begun of.
  std::atomic<uint64_t> reductions_ = 0;
  std::atomic<bool> reducing_ = false;
  std::atomic<uint64_t> taken_runs_ = 0;  // The chief has handed so many to this worker.
  RefusedRuns refused_runs_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> begun_empty_ = false;       // The empty contribution to the first step was made (JoinReply).
  std::atomic<bool> found_not_finite_ = false;  // A gradient of this worker.
  std::atomic<bool> left_ = false;
  std::atomic<bool> rolled_back_ = false;
  std::atomic<bool> ran_ = false;                 // The job, in this generation.
  std::atomic<uint64_t> checkpoint_version_ = 0;  // The newest complete checkpoint has it; 0: none, or the first.
  std::atomic<bool> fenced_ = false;
  std::atomic<bool> asked_to_leave_ = false;
  std::stop_source over_;  // It is rolled back, or the user wants to stop.
  std::atomic<bool> initialise_ = false;
  std::atomic<bool> lead_ = false;
  std::vector<std::weak_ptr<RetryingExchange>> running_ ABSL_GUARDED_BY(mutex_);
  // Made with the first push of each kind that needs them.
  std::map<PushContribution, std::shared_ptr<Residuals>> residuals_ ABSL_GUARDED_BY(mutex_);
  SlowSteps slow_steps_ ABSL_GUARDED_BY(mutex_);
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

}  // namespace

ClientImpl::~ClientImpl() {
  on_stop_.reset();
  for (const auto& exchange : Running()) {
    exchange->Abort(absl::CancelledError("the client is shutting down"));
    (void)exchange->Wait();  // It releases its memory.
  }
  context_->sender = nullptr;  // Here, not where the last exchange ends, which may be its own thread.
  if (joined_ && !left_ && !rolled_back_) (void)Leave("the worker ended without leaving");
  if (heartbeats_ != nullptr) heartbeats_->Stop();
  watch_.reset();
  timer_.Stop();  // Before what its calls use.
}

absl::Status ClientImpl::JoinJob(const Layout& layout) {
  PS_ASSIGN_OR_RETURN(joined_as_, ps::JoinJob(chief_, options_, layout));
  joined_ = true;
  if (recovers()) chief_.SetPatience({.longest = ToChrono(server_timeout()), .for_restart = true});
  if (const absl::Status taken = TakeAnswer(layout); !taken.ok()) {
    (void)Leave(Message(taken));
    return taken;
  }
  initialise_ = joined_as_.initialise();
  lead_ = joined_as_.lead();
  if (!replaced().empty()) Notice(absl::StrCat("this worker replaces ", replaced(), " as rank ", rank()));
  StartThreads();
  return absl::OkStatus();
}

absl::Status ClientImpl::TakeAnswer(const Layout& layout) {
  if (joined_as_.slice_elements() != kSliceElements) {
    return FailedPrecondition("the server cuts slices of ", joined_as_.slice_elements(), " elements; this client of ",
                              kSliceElements);
  }
  PS_ASSIGN_OR_RETURN(policy_, PolicyOf(joined_as_, layout));
  PS_RETURN_IF_ERROR(TakeWireFormat());
  PS_RETURN_IF_ERROR(TakeDataOfAll());
  return SetUpLinks(layout);
}

absl::Status ClientImpl::TakeDataOfAll() {
  if (!options_.own_data.has_value()) return absl::OkStatus();
  absl::StatusOr<DataSummary> all = FromProto(joined_as_.own_data());
  // A server that knows nothing of it leaves it out.
  if (!all.ok()) return absl::FailedPreconditionError("--data=own: the server says: " + Message(all.status()));
  if (!SameKind(*all, *options_.own_data)) {
    return absl::FailedPreconditionError("--data=own: what the server says of all workers' data is not of such data");
  }
  data_of_all_ = *std::move(all);
  return absl::OkStatus();
}

absl::Status ClientImpl::TakeWireFormat() {
  for (const auto& [flag, type] : {std::pair("wire_dtype", joined_as_.wire_type()),
                                   std::pair("weights_wire_dtype", joined_as_.weights_wire_type())}) {
    if (v1::WireType_IsValid(type) && (type != v1::WIRE_E3M0 || flag == absl::string_view("wire_dtype"))) continue;
    return FailedPrecondition("--", flag, ": the server's is number ", int{type}, ", which is unknown to this client");
  }
  context_->wire = {
      .pushes = {.type = static_cast<WireType>(joined_as_.wire_type()), .top_k = joined_as_.top_k()},
      .weights = static_cast<WireType>(joined_as_.weights_wire_type()),
      .error_feedback = joined_as_.error_feedback(),
      .error_feedback_decay = joined_as_.has_error_feedback_decay() ? joined_as_.error_feedback_decay() : 1.0F,
      .momentum_correction = joined_as_.momentum_correction(),
      .weights_delta = joined_as_.weights_delta()};
  const WireFormat& wire = context_->wire;
  const float momentum = wire.momentum_correction;
  if (!(momentum >= 0 && momentum < 1) || (momentum > 0 && wire.pushes.top_k == 0)) {
    return FailedPrecondition("--momentum_correction: the server's is ", momentum, ", which this client cannot do");
  }
  if (!(wire.error_feedback_decay > 0 && wire.error_feedback_decay <= 1)) {
    return FailedPrecondition("--error_feedback_decay: the server's is ", wire.error_feedback_decay,
                              ", which this client cannot do");
  }
  if (wire.pushes.top_k == 0 || (wire.error_feedback && wire.pushes.top_k <= kSliceElements)) return absl::OkStatus();
  return absl::FailedPreconditionError("--compress: what the server says of it makes no sense");
}

absl::Status ClientImpl::SetUpLinks(const Layout& layout) {
  context_->plan = SlicePlan(layout, static_cast<uint32_t>(joined_as_.shards_size()));
  if (policy_.local_steps.has_value()) {
    for (const std::vector<uint32_t>& fragment : policy_.local_steps->fragments) {
      const size_t ranges = SlicesOf(context_->plan, fragment).size();
      if (ranges <= kMaxRanges) continue;
      return FailedPrecondition("--fragments=", policy_.local_steps->fragments.size(), ": of this model one has ",
                                ranges, " runs of slices; at most ", kMaxRanges, " are supported");
    }
  }
  if (context_->wire.weights_delta) {
    PS_ASSIGN_OR_RETURN(TensorMemory memory, Annotate(AllocateTensors(layout), "--weights_delta"));
    context_->pulled = std::make_unique<PulledWeights>(num_shards(), std::move(memory));
  }
  context_->rank = rank();
  context_->incarnation = incarnation();
  context_->exact_versions = policy_.exact_versions;
  context_->generation = generation();
  context_->patience = {.longest = ToChrono(recovers() ? server_timeout() : options_.connect_timeout),
                        .for_restart = recovers()};
  context_->spread = RandomNumber();
  context_->notice_every = ToChrono(options_.notice_every);
  context_->on_notice = options_.on_notice;
  context_->on_not_finite = [this] { found_not_finite_ = true; };
  context_->on_fenced = [this](uint64_t running) { OnFenced(running); };
  context_->on_pushed = [this](uint64_t step, uint32_t samples) { heartbeats_->AddPush(step, samples); };
  if (options_.sender_thread) context_->sender = std::make_unique<TaskThread>("sender", TaskThread::AtEnd::kDoesTasks);
  return LinkAgain();
}

absl::Status ClientImpl::LinkAgain() {
  PS_ASSIGN_OR_RETURN(ShardLinks made,
                      LinkShards(options_, joined_as_, context_->plan, [this] { return gradients_.MakeSpare(); }));
  channels_ = std::move(made.channels);
  context_->links = std::move(made.links);
  has_shared_memory_ = made.has_shared_memory;
  Notice(absl::StrCat("exchanging with ", made.text));
  return absl::OkStatus();
}

void ClientImpl::StartThreads() {
  on_stop_.emplace(options_.stop, [this] {
    Fail(absl::CancelledError("stopped"));
    over_.request_stop();
  });
  const auto on_refused = [this](const absl::Status& status) { OnRefused(status); };
  // A stream does not say which generation runs; the answer to a heartbeat does.
  const auto ask = [this] { heartbeats_->BeatNow(); };
  const auto on_watch_refused = [this, ask](const absl::Status& status) { IsFenced(status) ? ask() : Fail(status); };
  watch_ = std::make_unique<ChiefWatch>(chief_.stub(), timer_, joined_as_.id(),
                                        ChiefCallbacks{.on_state =
                                                           [this](const v1::HeartbeatReply& state) {
                                                             if (state.takes_reports()) heartbeats_->TakesReports(true);
                                                             OnState(state);
                                                           },
                                                       .on_refused = on_watch_refused,
                                                       .on_closed = ask});
  // The state on the stream is at least as new.
  const auto on_beat = [this](const v1::HeartbeatReply& state) {
    if (JobIsOver(state) || !watch_->open()) OnState(state);
  };
  heartbeats_ = std::make_unique<Heartbeats>(
      chief_.stub(), timer_, joined_as_.id(), std::chrono::milliseconds(joined_as_.lease_ms()),
      ChiefCallbacks{.on_state = on_beat, .on_refused = on_refused}, context_->traffic);
  heartbeats_->SetStep(start_step());
  watch_->Start();
  heartbeats_->Start();
  CheckProgress();
}

void ClientImpl::CheckProgress() {
  for (const auto& exchange : Running()) exchange->CheckProgress();
  timer_.At(timer_.now() + kProgressEvery, [this] { CheckProgress(); });
}

void ClientImpl::OnState(const v1::HeartbeatReply& state) {
  if (state.generation() != 0 && state.generation() != generation()) return OnGeneration(state.generation());
  initialise_ = state.initialise();
  if (state.phase() == v1::PHASE_RUNNING) ran_ = true;
  if (state.checkpoint_version() > 0) checkpoint_version_ = state.checkpoint_version();
  if (state.leave() && !asked_to_leave_.exchange(true) && options_.on_asked_to_leave) options_.on_asked_to_leave();
  {
    MutexLock lock(mutex_);
    if (!all_done_) lead_ = state.lead();
  }
  if (state.phase() == v1::PHASE_FAILED) Fail(absl::AbortedError("the job failed: " + state.failure()));
  if (state.phase() == v1::PHASE_SHUT_DOWN) Fail(JobShutDown());
}

std::shared_ptr<RetryingExchange> ClientImpl::Run(ExchangeRequest request, DoneCallback callback,
                                                  absl::Status problem) {
  auto exchange = std::make_shared<RetryingExchange>(context_, timer_, std::move(request), std::move(callback));
  {
    MutexLock lock(mutex_);
    std::erase_if(running_, [](const auto& other) { return other.expired(); });
    running_.push_back(exchange);
    if (!failure_.ok()) problem = failure_;
  }
  if (problem.ok()) problem = exchange->CheckRequest();
  if (!problem.ok()) exchange->Abort(problem);
  exchange->Begin();
  return exchange;
}

std::vector<std::shared_ptr<RetryingExchange>> ClientImpl::Running() {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<RetryingExchange>> running;
  for (const auto& each : running_) {
    if (auto exchange = each.lock(); exchange != nullptr) running.push_back(std::move(exchange));
  }
  return running;
}

std::shared_ptr<Exchange> ClientImpl::Start(const PushInfo& push, const ConstTensors& gradients,
                                            const MutableTensors& weights, bool deferred, bool view,
                                            DoneCallback callback) {
  const bool pushes = !gradients.empty();
  const bool pulls = !weights.empty();
  if (pushes) {
    heartbeats_->SetStep(push.step);
    for (uint64_t next = next_step_; next <= push.step && !next_step_.compare_exchange_weak(next, push.step + 1);) {
    }
  }
  ExchangeRequest request;
  request.kind = !pushes ? CallKind::kPull : pulls ? CallKind::kPushPull : CallKind::kPush;
  request.push = push;
  if (!push.runs.has_value()) request.push.runs = taken_runs_;
  if (pushes) request.begun = ++begun_;
  request.out = gradients;
  request.in = weights;
  request.deferred = deferred;
  request.view = view && can_view() && push.tensors.empty();
  request.empty_contributions = policy_.empty_contributions;
  if (pushes && hands_out_runs()) {
    MutexLock lock(mutex_);
    refused_runs_.Look();  // It lets go of memory that the next push stages its gradients in.
  }
  const absl::Status staged = StageGradients(request);
  const uint64_t runs = *request.push.runs;
  std::shared_ptr<RetryingExchange> exchange = Run(std::move(request), std::move(callback), staged);
  if (pushes && hands_out_runs()) {
    MutexLock lock(mutex_);
    refused_runs_.Begun(runs, /*partial=*/!push.tensors.empty(), exchange);
  }
  return exchange;
}

absl::StatusOr<std::optional<RoundedMemory>> ClientImpl::RoundedGradients() {
  if (!context_->wire.only_rounds()) return std::nullopt;
  return gradients_.Rounded(context_->wire.pushes, has_shared_memory_);
}

absl::Status ClientImpl::StageGradients(ExchangeRequest& request) {
  const auto who_pushes = [&] { return absl::StrCat("rank ", rank(), ", step ", request.push.step); };
  if (request.push.groups.has_value()) {
    v1::PushRequest message;
    ToProto(*request.push.groups, message.mutable_groups());
    if (message.ByteSizeLong() > kMaxGroupBytes) {
      return InvalidArgument(who_pushes(), ": PushInfo.groups: ", message.ByteSizeLong(), " bytes; at most ",
                             kMaxGroupBytes, " are supported");
    }
  }
  if (request.sends_no_slices()) return absl::OkStatus();
  const WireFormat& wire = context_->wire;
  const std::string who = who_pushes();
  if (request.push.rounded && !wire.only_rounds()) {
    return InvalidArgument(who,
                           ": PushInfo.rounded: the job sends float32, or has error feedback, which is the client's");
  }
  if (wire.pushes.is_float32()) {
    if (has_shared_memory_) gradients_.Share(request);
    return absl::OkStatus();
  }
  PS_RETURN_IF_ERROR(Annotate(gradients_.Encode(request, wire.pushes, has_shared_memory_), who));
  if (!wire.error_feedback) return absl::OkStatus();
  MutexLock lock(mutex_);
  std::shared_ptr<Residuals>& residuals = residuals_[request.push.contribution];
  try {
    const bool gradient = request.push.contribution == PushContribution::kGradient;
    if (residuals == nullptr) {
      residuals = std::make_shared<Residuals>(context_->plan, gradient && wire.momentum_correction != 0);
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for what pushes do not send (--error_feedback, --compress)");
  }
  if (!residuals->TryUse()) {
    return FailedPrecondition(who, ": the push before it is still under way, and error feedback needs its end");
  }
  request.residuals = residuals;
  return absl::OkStatus();
}

absl::Status ClientImpl::Initialise(const ConstTensors& values) {
  return Initialise(values, /*state=*/nullptr, After(options_.start_timeout));
}

absl::Status ClientImpl::Initialise(const ConstTensors& values, const OptimizerState* state, TimePoint give_up) {
  ExchangeRequest request;
  request.kind = CallKind::kInit;
  request.out = values;
  request.state = state;
  request.give_up = give_up;
  return Run(std::move(request))->Wait().status();
}

bool ClientImpl::FollowShards() {
  v1::StatusReply reply;
  const absl::Status asked =
      chief_.Once(kAskTime, [&](v1::Chief::Stub& stub, grpc::ClientContext& context, int /*earlier*/) {
        return FromGrpc(stub.Status(&context, v1::StatusRequest(), &reply));
      });
  if (!asked.ok() || reply.shards_size() != joined_as_.shards_size()) return false;
  bool moved = false;
  for (int shard = 1; shard < reply.shards_size(); ++shard) {  // The chief is where the user said.
    v1::ShardInfo& known = *joined_as_.mutable_shards(shard);
    const v1::ShardInfo& now = reply.shards(shard);
    if (now.address().empty() || (now.address() == known.address() && now.local_socket() == known.local_socket())) {
      continue;
    }
    Notice(absl::StrCat("shard ", shard, " is at ", now.address(), " now: it was started again"));
    known.set_address(now.address());
    known.set_local_socket(now.local_socket());
    moved = true;
  }
  if (!moved) return false;
  if (const absl::Status linked = LinkAgain(); !linked.ok()) {
    Notice(Message(linked));
    return false;
  }
  return true;
}

absl::StatusOr<ExchangeResult> ClientImpl::Pull(const MutableTensors& weights, std::optional<uint64_t> version,
                                                std::optional<uint64_t> step) {
  return Run(PullRequest(weights, version, step))->Wait();
}

absl::StatusOr<ExchangeResult> ClientImpl::PullFloat32(const MutableTensors& weights) {
  ExchangeRequest request = PullRequest(weights, std::nullopt, std::nullopt);
  request.float32 = true;
  return Run(std::move(request))->Wait();
}

absl::Status ClientImpl::PushNothing() {
  const bool differences = policy_.local_steps.has_value();
  const PushInfo push = {
      .step = start_step(),
      .samples = 0,
      .contribution = differences ? PushContribution::kWeightDifference : PushContribution::kGradient,
      .runs = 0};
  const ConstTensors nothing(context_->plan.layout().size());
  const TimePoint give_up = After(options_.start_timeout);
  absl::Status pushed;
  do {  // A shard may not know yet that the others have come to this step.
    pushed = Start(push, nothing, {}, /*deferred=*/false, /*view=*/false, nullptr)->Wait().status();
    if (absl::IsOutOfRange(pushed)) PauseUntil(Now() + kBehindPause, over_.get_token());
  } while (absl::IsOutOfRange(pushed) && !over_.stop_requested() && Now() < give_up);
  if (pushed.ok()) begun_empty_ = true;
  return pushed;
}

absl::StatusOr<ExchangeResult> ClientImpl::Start(const ConstTensors& initial_values,
                                                 const OptimizerState* initial_state, const MutableTensors& weights) {
  const TimePoint started = Now();
  const TimePoint deadline = After(options_.start_timeout);
  TimePoint heard = started;
  const Patience& patience = context_->patience;
  // Says whose time ran out.
  const auto gave_up = [&](const absl::Status& status, TimePoint now) {
    const bool silent = now - heard > patience.longest;
    const std::string flag = silent ? patience.flag() : "--start_timeout";
    if (absl::StrContains(Message(status), flag)) return status;
    return absl::Status(status.code(), absl::StrCat(Message(status), "; gave up after ",
                                                    FormatSeconds(now - (silent ? heard : started)), " (", flag, ")"));
  };
  std::optional<uint64_t> version;  // The newest, as long as there is nothing to tell which one.
  // Others wait for it, and it for them, for as long as they make steps.
  if (joined_as_.begins_empty()) PS_RETURN_IF_ERROR(PushNothing());
  for (;;) {
    if (initialise_) {
      // A server that has just been started again may not know yet who initialises; whoever is fenced is told by the
      // pull.
      const TimePoint began = Now();
      const auto turn = ToChrono(options_.notice_every);
      const absl::Status sent = Initialise(initial_values, initial_state, std::min(deadline, began + turn));
      if (absl::IsUnavailable(sent) || absl::IsDeadlineExceeded(sent)) {
        const TimePoint now = Now();
        // Values were moving, until they did not; or a shard answered that it does not take them yet.
        if (now - began > 2 * turn) heard = std::max(heard, now - turn);
        if (absl::IsDeadlineExceeded(sent)) heard = now;
        if (now >= deadline || now - heard > patience.longest) return gave_up(sent, now);
        if (absl::IsUnavailable(sent) && FollowShards()) heard = now;
        continue;
      }
      if (sent.ok()) heard = Now();
      if (!sent.ok() && !absl::IsFailedPrecondition(sent)) return sent;
    }
    // Short waits, so that a grant to initialise that passes on is seen.
    const TimePoint wait_end = std::min(deadline, Now() + ToChrono(options_.notice_every));
    absl::StatusOr<ExchangeResult> pulled = Run(PullRequest(weights, version, start_step(), wait_end))->Wait();
    const TimePoint now = Now();
    if (absl::IsDeadlineExceeded(pulled.status())) heard = now;
    if (pulled.ok() && synchronous()) {
      // A shard may not have published yet what others have: all weights are to be of one version.
      const uint64_t newest =
          std::max(start_step(), *std::max_element(pulled->versions.begin(), pulled->versions.end()));
      if (pulled->version == newest) {
        ran_ = true;
        return pulled;
      }
      version = newest;
      continue;
    }
    // The others need not wait for this worker where versions are not exact: the one asked for may be gone already.
    if (absl::IsFailedPrecondition(pulled.status()) && !policy().exact_versions &&
        std::exchange(version, std::nullopt).has_value() && now < deadline) {
      continue;
    }
    const bool passing = absl::IsDeadlineExceeded(pulled.status()) || absl::IsUnavailable(pulled.status());
    if (pulled.ok()) ran_ = true;
    if (!passing) return pulled;
    if (now >= deadline || now - heard > patience.longest) return gave_up(pulled.status(), now);
    if (absl::IsUnavailable(pulled.status()) && FollowShards()) heard = Now();
    Notice(Message(pulled.status()));
  }
}

absl::StatusOr<std::unique_ptr<Client>> Client::Join(const ClientOptions& options, const Layout& layout) {
  PS_RETURN_IF_ERROR(ValidateClientOptions(options));
  PS_RETURN_IF_ERROR(ValidateLayout(layout));
  if (options.stop.stop_requested()) return absl::CancelledError("joining: stopped");
  auto client = std::make_unique<ClientImpl>(
      options, MakeChannel(options.server, grpc::InsecureChannelCredentials(), 0, options.long_links));
  PS_RETURN_IF_ERROR(client->JoinJob(layout));
  return client;
}

void ClientImpl::OnGeneration(uint64_t running) {
  const std::string what =
      absl::StrCat("generation ", running, " of job ", options_.job, " is running, not generation ", generation());
  if (!recovers()) return Fail(absl::FailedPreconditionError("fenced: " + what));
  Fail(FailedPrecondition("rank ", rank(), ": the job was rolled back to an earlier checkpoint (", what,
                          "); make a new client"),
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

void ClientImpl::OnRefused(const absl::Status& status) {
  if (IsFenced(status) && !left_) fenced_ = true;
  Fail(status);
}

void ClientImpl::ReportStep(const StepReport& step) {
  using std::chrono::system_clock;
  const auto unix_ms = std::chrono::duration_cast<std::chrono::milliseconds>(system_clock::now().time_since_epoch());
  heartbeats_->AddStep(step, static_cast<uint64_t>(unix_ms.count()));
  std::optional<std::string> slow;
  {
    MutexLock lock(mutex_);
    slow = slow_steps_.Add(step, timer_.now());
  }
  // Not here: whoever is told may take its time.
  if (slow.has_value()) timer_.At(timer_.now(), [this, text = *std::move(slow)] { Notice(text); });
}

absl::Status ClientImpl::CountLocalStep() {
  heartbeats_->CountLocalStep();
  MutexLock lock(mutex_);
  return failure_;
}

void ClientImpl::Fail(const absl::Status& failure, bool rolled_back) {
  {
    MutexLock lock(mutex_);
    if ((left_ && !rolled_back) || !failure_.ok()) return;
    failure_ = failure;
    rolled_back_ = rolled_back;
  }
  for (const auto& exchange : Running()) exchange->Abort(failure);
  if (rolled_back) over_.request_stop();
}

absl::Status ClientImpl::Ended(const absl::Status& status) {
  MutexLock lock(mutex_);
  return !status.ok() && rolled_back_ ? failure_ : status;
}

absl::Status ClientImpl::AskChief(ChiefCalls::Wait wait, const ChiefCalls::Call& call) {
  wait.stop = over_.get_token();
  const absl::Status status = chief_.UntilAnswered(wait, call);
  if (IsFenced(status)) AskWhyFenced();
  return Ended(status);
}

void ClientImpl::AskWhyFenced() {
  if (rolled_back_ || fenced_) return;
  v1::HeartbeatRequest request;
  *request.mutable_id() = joined_as_.id();
  v1::HeartbeatReply state;
  const absl::Status answered = chief_.UntilAnswered(
      {.what = "asking which generation runs", .call_time = kControlCallTime, .stop = over_.get_token()},
      [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
        return FromGrpc(chief.Heartbeat(&context, request, &state));
      });
  if (IsFenced(answered)) return OnRefused(answered);
  if (answered.ok() && state.generation() != 0) OnGeneration(state.generation());
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
  asked.set_ahead(request.ahead);
  {
    MutexLock lock(mutex_);
    for (const uint64_t run : refused_runs_.Among(request.finished)) asked.add_refused(run);
  }
  for (bool paused = false;;) {
    const auto left = std::max<std::chrono::nanoseconds>((paused ? TimePoint::max() : wait_end) - Now(), {});
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::min(left, ToChrono(options_.notice_every)));
    asked.set_wait_ms(static_cast<uint32_t>(wait.count()));
    v1::TakeRunReply reply;
    PS_RETURN_IF_ERROR(AskChief({.what = "taking a run of samples", .call_time = wait + kAnswerMargin},
                                [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
                                  return FromGrpc(chief.TakeRun(&context, asked, &reply));
                                }));
    if (asked.refused_size() > 0) {
      MutexLock lock(mutex_);
      refused_runs_.Told(request.finished);
    }
    if (reply.outcome() == v1::TakeRunReply::RUN) {
      taken_runs_ = request.number;
      return TakenRun{.outcome = TakenRun::Outcome::kRun, .run = reply.run()};
    }
    if (reply.outcome() == v1::TakeRunReply::DONE) return TakenRun{.outcome = TakenRun::Outcome::kDone};
    const bool has_open = request.finished + 1 < request.number;
    // While training stands still for lack of workers, nobody waits for this one's contribution.
    paused = reply.paused() && request.wait > absl::ZeroDuration();
    if (has_open || (!paused && Now() >= wait_end)) return TakenRun{.outcome = TakenRun::Outcome::kWait};
    Notice(reply.waiting_for());
  }
}

absl::StatusOr<Reduced> ClientImpl::Reduce(const std::string& name, Reduction operation,
                                           std::span<const double> values) {
  if (values.size() > kMaxReduced) {
    return InvalidArgument(values.size(), " numbers; at most ", kMaxReduced, " can be reduced at once");
  }
  if (reducing_.exchange(true)) {
    return FailedPrecondition("rank ", rank(), ": another reduction of this worker is under way");
  }
  const absl::Cleanup over = [this] { reducing_ = false; };
  v1::ReduceRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_number(++reductions_);
  request.set_step(std::max<uint64_t>(start_step(), next_step_));
  request.set_name(name);
  request.set_operation(static_cast<v1::ReduceRequest::Operation>(operation));
  request.mutable_values()->Assign(values.begin(), values.end());
  request.set_wait_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.notice_every)));
  for (;;) {
    v1::ReduceReply reply;
    PS_RETURN_IF_ERROR(AskChief({.what = name.empty() ? "reducing numbers" : "reducing: " + name,
                                 .call_time = std::chrono::milliseconds(request.wait_ms()) + kAnswerMargin},
                                [&](v1::Chief::Stub& chief, grpc::ClientContext& context, int) {
                                  return FromGrpc(chief.Reduce(&context, request, &reply));
                                }));
    if (reply.waiting_for().empty()) {
      if (static_cast<size_t>(reply.values_size()) != values.size()) {
        return Internal("the server answered with ", reply.values_size(), " numbers, and not ", values.size());
      }
      return Reduced{.values = {reply.values().begin(), reply.values().end()}, .workers = reply.workers()};
    }
    Notice(reply.waiting_for());
  }
}

absl::Status ClientImpl::Done(bool counts_as_empty) {
  v1::DoneRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_counts_as_empty(counts_as_empty);
  heartbeats_->ReportNow();
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
  if (heartbeats_ != nullptr) heartbeats_->StopAfterReport();
  v1::LeaveRequest request;
  *request.mutable_id() = joined_as_.id();
  request.set_reason(reason);
  request.set_not_finite(!reason.empty() && found_not_finite_);
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
  if (fenced) AskWhyFenced();
  if (rolled_back_) return Ended(absl::UnknownError(""));
  if (!absl::IsUnavailable(left)) return left;
  {
    MutexLock lock(mutex_);
    if (!all_done_) return left;
  }
  // All that the job was to do is done and saved. It may be over: the servers end when the last worker has left.
  Notice(absl::StrCat(Message(left), "; the job's work was done, so this is no error"));
  return absl::OkStatus();
}

absl::StatusOr<HashedWeights> ClientImpl::WeightsHash() {
  const HashJob job = {.channels = channels_,
                       .slices = context_->plan.slices().size(),
                       .one_version = synchronous(),
                       .id = joined_as_.id()};
  const absl::Duration longest = std::max(options_.connect_timeout, server_timeout());
  absl::StatusOr<HashedWeights> hashed = HashWeights(job, After(longest), over_.get_token());
  if (IsFenced(hashed.status())) AskWhyFenced();
  return hashed.ok() ? hashed : Ended(hashed.status());
}

absl::StatusOr<OptimizerState> ClientImpl::PullState(std::optional<uint64_t> version) {
  const StateJob job = {
      .channels = channels_, .plan = &context_->plan, .one_version = synchronous(), .id = joined_as_.id()};
  absl::StatusOr<OptimizerState> pulled =
      ps::PullState(job, version, {.silence = context_->patience.longest, .give_up = After(options_.start_timeout)},
                    over_.get_token());
  if (IsFenced(pulled.status())) AskWhyFenced();
  return pulled.ok() ? std::move(pulled) : Ended(pulled.status());
}

}  // namespace ps
