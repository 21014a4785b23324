#include "ps/observer.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include <grpcpp/client_context.h>
#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/endpoint.h"
#include "common/grpc_call.h"
#include "common/proto_values.h"
#include "common/slices.h"
#include "common/status.h"
#include "common/sync.h"
#include "ps/v1/ps.grpc.pb.h"
#include "worker/link/pull_weights.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kObserverPause(200);
constexpr std::chrono::seconds kStatusTime(5);  // One question to the chief.
constexpr std::chrono::seconds kPullTime(5);    // After it the chief is asked anew: shards may be elsewhere.

std::string NameOf(v1::Phase phase) {
  switch (phase) {
    case v1::PHASE_GATHERING:
      return "gathering";
    case v1::PHASE_RUNNING:
      return "running";
    case v1::PHASE_FINISHED:
      return "finished";
    case v1::PHASE_FAILED:
      return "failed";
    case v1::PHASE_SHUT_DOWN:
      return "shut down";
    default:
      return "unknown";
  }
}

// FAILED_PRECONDITION, naming the first tensor that differs. Observers look at names and shapes alone.
absl::Status CheckSameModel(const Layout& known, const Layout& served) {
  for (size_t i = 0; i < std::max(known.size(), served.size()); ++i) {
    const std::string before = i < known.size() ? ToString(known[i]) : "nothing";
    const std::string now = i < served.size() ? ToString(served[i]) : "nothing";
    if (before == now) continue;
    return FailedPrecondition("the job of these servers has another model now: its tensor ", i, " is ", now,
                              ", and was ", before);
  }
  return absl::OkStatus();
}

}  // namespace

class Observer::Impl {
 public:
  explicit Impl(const ObserverOptions& options)
      : options_(options), chief_(MakeChannel(options.server, grpc::InsecureChannelCredentials(), 0)) {}

  // Asked until the chief answers, or the deadline.
  absl::StatusOr<v1::StatusReply> Ask(bool layout, TimePoint deadline) {
    v1::StatusRequest request;
    request.set_layout(layout);
    const auto stub = v1::Chief::NewStub(chief_);
    for (;;) {
      v1::StatusReply reply;
      grpc::ClientContext context;
      SetDeadline(context, std::clamp<std::chrono::nanoseconds>(deadline - Now(), kObserverPause, kStatusTime));
      absl::Status status;
      {
        const std::stop_callback cancel(options_.stop, [&context] { context.TryCancel(); });
        status = FromServer(stub->Status(&context, request, &reply), options_.stop.stop_requested());
      }
      if (options_.stop.stop_requested()) return Stopped();
      if (status.ok()) return reply;
      if (!IsTransient(status) || Now() + kObserverPause >= deadline) {
        return absl::Status(status.code(),
                            absl::StrCat("the chief at ", options_.server, ": ", ConnectionProblem(status)));
      }
      PauseUntil(Now() + kObserverPause, options_.stop);
    }
  }

  // The model that the servers have, and where they are. UNAVAILABLE while there is none.
  struct Served {
    std::shared_ptr<const SlicePlan> plan;
    ServedModel model;
    uint64_t generation = 0;
  };
  absl::StatusOr<Served> Find(TimePoint deadline) {
    PS_ASSIGN_OR_RETURN(const v1::StatusReply status, Ask(/*layout=*/true, deadline));
    PS_ASSIGN_OR_RETURN(std::shared_ptr<const SlicePlan> plan, Learn(status));
    Served served = {.plan = std::move(plan), .model = {}, .generation = status.generation()};
    served.model.one_version = status.synchronous();
    for (const v1::ShardInfo& shard : status.shards()) {
      const std::string address = shard.shard() == 0 ? options_.server : shard.address();
      if (address.empty()) return NoWeights(status);
      served.model.shards.push_back({.channel = ChannelTo(shard.shard(), address), .address = address});
    }
    return served;
  }

  absl::StatusOr<Layout> GetLayout() {
    return UntilDeadline<Layout>([this](TimePoint deadline) -> absl::StatusOr<Layout> {
      PS_ASSIGN_OR_RETURN(const Served served, Find(deadline));
      return served.plan->layout();
    });
  }

  absl::StatusOr<ObservedVersion> Pull(const MutableTensors& weights, std::optional<uint64_t> version) {
    return UntilDeadline<ObservedVersion>([&](TimePoint deadline) -> absl::StatusOr<ObservedVersion> {
      PS_ASSIGN_OR_RETURN(const Served served, Find(deadline));
      PS_RETURN_IF_ERROR(CheckFits(weights, served.plan->layout()));
      const auto left = std::max<std::chrono::nanoseconds>(deadline - Now(), kObserverPause);
      const PullTimes times = {
          .timeout = std::min<std::chrono::nanoseconds>(left, kPullTime), .silence = left, .stop = options_.stop};
      PS_ASSIGN_OR_RETURN(std::vector<uint64_t> versions,
                          PullWeights(served.model, *served.plan, version, times, weights));
      return ObservedVersion{.versions = std::move(versions), .generation = served.generation};
    });
  }

  TimePoint Deadline() const { return Now() + ToChrono(options_.timeout); }

 private:
  static absl::Status Stopped() { return absl::CancelledError("observing: stopped"); }
  static absl::Status NoWeights(const v1::StatusReply& status) {
    if (status.phase() == v1::PHASE_FAILED) return absl::AbortedError("the job failed: " + status.failure());
    if (status.phase() == v1::PHASE_SHUT_DOWN) return JobShutDown();
    return Unavailable("the job has no weights yet", status.waiting_for().empty() ? "" : ": ", status.waiting_for());
  }
  static absl::Status CheckFits(const MutableTensors& weights, const Layout& layout) {
    if (weights.size() != layout.size()) {
      return InvalidArgument(weights.size(), " blocks of weights; the model has ", layout.size(), " tensors");
    }
    for (size_t i = 0; i < layout.size(); ++i) {
      if (weights[i].size() == static_cast<size_t>(layout[i].elements())) continue;
      return InvalidArgument("the block of ", ToString(layout[i]), " has ", weights[i].size(), " elements");
    }
    return absl::OkStatus();
  }

  // The first result, or the error once no other attempt can help or the time is over.
  template <typename Result, typename Attempt>
  absl::StatusOr<Result> UntilDeadline(const Attempt& attempt) {
    const TimePoint deadline = Deadline();
    for (;;) {
      absl::StatusOr<Result> result = attempt(deadline);
      if (options_.stop.stop_requested()) return Stopped();
      if (result.ok() || !IsTransient(result.status()) || Now() + kObserverPause >= deadline) return result;
      PauseUntil(Now() + kObserverPause, options_.stop);
    }
  }

  // The chief says each time what the model is: the servers may be another job's by now.
  absl::StatusOr<std::shared_ptr<const SlicePlan>> Learn(const v1::StatusReply& status) {
    if (status.layout().tensors_size() == 0) {
      if (status.parameters() > 0)
        return absl::UnimplementedError("the chief does not tell what tensors the model has");
      return NoWeights(status);
    }
    const Layout layout = FromProto(status.layout());
    PS_RETURN_IF_ERROR(Annotate(ValidateLayout(layout), "the chief's layout"));
    const auto shards = static_cast<uint32_t>(status.shards_size());
    const MutexLock lock(mutex_);
    if (plan_ != nullptr) PS_RETURN_IF_ERROR(CheckSameModel(plan_->layout(), layout));
    if (plan_ == nullptr || plan_->num_shards() != shards) plan_ = std::make_shared<const SlicePlan>(layout, shards);
    return plan_;
  }
  std::shared_ptr<grpc::Channel> ChannelTo(uint32_t shard, const std::string& address) {
    const MutexLock lock(mutex_);
    auto& [known, channel] = channels_[shard];
    if (channel == nullptr || known != address) {
      known = address;
      channel = shard == 0 ? chief_ : MakeChannel(address, grpc::InsecureChannelCredentials(), 0);
    }
    return channel;
  }

  const ObserverOptions options_;
  const std::shared_ptr<grpc::Channel> chief_;
  Mutex mutex_;
  std::shared_ptr<const SlicePlan> plan_ ABSL_GUARDED_BY(mutex_);  // Null: no model was seen yet.
  std::map<uint32_t, std::pair<std::string, std::shared_ptr<grpc::Channel>>> channels_ ABSL_GUARDED_BY(mutex_);
};

Observer::Observer(const ObserverOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Observer::~Observer() = default;

absl::StatusOr<ObservedJob> Observer::Status() {
  PS_ASSIGN_OR_RETURN(const v1::StatusReply status, impl_->Ask(/*layout=*/false, impl_->Deadline()));
  return ObservedJob{.job = status.job(),
                     .generation = status.generation(),
                     .phase = NameOf(status.phase()),
                     .failure = status.failure(),
                     .waiting_for = status.waiting_for(),
                     .workers = static_cast<uint32_t>(status.workers_size())};
}

absl::StatusOr<Layout> Observer::GetLayout() { return impl_->GetLayout(); }

absl::StatusOr<ObservedVersion> Observer::Pull(const MutableTensors& weights, std::optional<uint64_t> version) {
  return impl_->Pull(weights, version);
}

}  // namespace ps
