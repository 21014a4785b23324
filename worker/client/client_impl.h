// The client (ps/client.h): what it is made of. client.cc has its join and its exchanges, then what it asks the chief,
// and how it ends.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "ps/client.h"
#include "worker/client/chief_calls.h"
#include "worker/client/exchange.h"
#include "worker/client/gradient_memory.h"
#include "worker/client/heartbeats.h"
#include "worker/client/timer.h"
#include "worker/link/tensor_memory.h"

namespace ps {

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
  uint64_t start_step() const override { return joined_as_.start_step(); }
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
  absl::StatusOr<ExchangeResult> Start(const ConstTensors& initial_values, const MutableTensors& weights) override;

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
  absl::Status CountLocalStep() override;
  void SetBusy(const std::string& what) override { heartbeats_->SetBusy(what); }
  absl::Status Done(bool counts_as_empty) override;
  absl::Status Leave(const std::string& reason) override;
  absl::StatusOr<HashedWeights> WeightsHash() override;

 private:
  static TimePoint After(absl::Duration time) { return Now() + ToChrono(time); }
  std::shared_ptr<Exchange> Start(const PushInfo& push, const ConstTensors& gradients, const MutableTensors& weights,
                                  bool deferred, bool view, DoneCallback callback);
  std::shared_ptr<RetryingExchange> Run(ExchangeRequest request, DoneCallback callback = nullptr,
                                        const absl::Status& problem = absl::OkStatus());
  // Where what the request sends is found as the job sends it, if that is not where the caller has it.
  absl::Status StageGradients(ExchangeRequest& request);
  void Notice(const std::string& text) const {
    if (options_.on_notice) options_.on_notice(text);
  }
  // Takes what the chief has answered, unless it cannot be: then the worker leaves with this error.
  absl::Status TakeAnswer(const Layout& layout);
  // What exchanges need, from what the chief has answered.
  absl::Status SetUpLinks(const Layout& layout);
  // To where `joined_as_` says that the shards are. While no exchange is under way.
  absl::Status LinkAgain();
  // Until the job has begun a shard may be started again at another address: asks the chief, and is true if there is a
  // shard that has moved and is linked now. While no exchange is under way.
  bool FollowShards();
  // Ends when this time is over, but for what moves.
  absl::Status Initialise(const ConstTensors& values, TimePoint give_up);
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
  bool has_shared_memory_ = false;              // With one shard at least.
  std::atomic<uint64_t> begun_ = 0;             // Pushes.
  std::atomic<uint64_t> taken_runs_ = 0;        // That the chief has handed to this worker.
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
  RunningExchanges exchanges_;
  // Made with the first push of each kind that needs them.
  std::map<PushContribution, std::shared_ptr<Residuals>> residuals_ ABSL_GUARDED_BY(mutex_);
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

}  // namespace ps
