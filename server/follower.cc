#include "server/follower.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/connection_problem.h"
#include "common/grpc_status.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kRetry(100);
constexpr std::chrono::seconds kProbe(10);
constexpr std::chrono::seconds kUnreachableEvery(3);

}  // namespace

class Follower::Call final : public grpc::ClientBidiReactor<v1::ShardReport, v1::ChiefUpdate>,
                             public std::enable_shared_from_this<Call> {
 public:
  explicit Call(Follower& follower) : stub_(follower.channel_), follower_(follower) {}

  void Begin(const v1::Registration& registration) {
    self_ = shared_from_this();
    stub_.async()->Follow(&context_, this);
    AddHold();  // Reports come from outside of the call's reactions.
    v1::ShardReport report;
    *report.mutable_registration() = registration;
    StartRead(&update_);
    Send(report);
    StartCall();
  }

  void Send(const v1::ShardReport& report) {
    MutexLock lock(mutex_);
    if (ended_) return;
    queue_.push_back(report);
    if (queue_.size() == 1) StartWrite(&queue_.front());
  }

  void OnReadDone(bool ok) override {
    if (!ok) return EndReports();
    follower_.on_update_(update_);
    update_.Clear();
    StartRead(&update_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return EndReports();
    MutexLock lock(mutex_);
    queue_.pop_front();
    if (!ended_ && !queue_.empty()) StartWrite(&queue_.front());
  }

  void OnDone(const grpc::Status& status) override {
    follower_.on_end_(FromGrpc(status));
    {
      MutexLock lock(mutex_);
      done_ = true;
    }
    finished_.NotifyAll();
    self_.reset();
  }

  void CancelAndWait() {
    context_.TryCancel();
    MutexLock lock(mutex_);
    while (!done_) finished_.Wait(mutex_);  // gRPC ends a cancelled call at once.
  }

 private:
  void EndReports() {
    {
      MutexLock lock(mutex_);
      if (std::exchange(ended_, true)) return;
    }
    RemoveHold();
  }

  v1::Chief::Stub stub_;
  Follower& follower_;
  grpc::ClientContext context_;
  v1::ChiefUpdate update_;
  std::shared_ptr<Call> self_;
  Mutex mutex_;
  CondVar finished_;
  std::deque<v1::ShardReport> queue_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

Follower::Follower(std::shared_ptr<grpc::Channel> chief, std::function<void(const v1::ChiefUpdate&)> on_update,
                   std::function<void(const absl::Status&)> on_end)
    : channel_(std::move(chief)), on_update_(std::move(on_update)), on_end_(std::move(on_end)) {}

// Any answer shows that the chief is reachable; an error says what is wrong.
absl::Status Follower::Probe(const std::stop_token& stop, TimePoint deadline) const {
  grpc::ClientContext context;
  const auto time = std::min<std::chrono::nanoseconds>(kProbe, deadline - Now());
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::system_clock::duration>(time));
  const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
  v1::StatusReply reply;
  return FromGrpc(v1::Chief::NewStub(channel_)->Status(&context, v1::StatusRequest(), &reply));
}

void Follower::Stop() {
  if (call_ != nullptr) call_->CancelAndWait();
}

absl::Status Follower::Start(const v1::Registration& registration, const std::string& address, TimePoint deadline,
                             const std::stop_token& stop) {
  const TimePoint began = Now();
  TimePoint noticed;
  for (absl::Status probed = Probe(stop, deadline); !probed.ok(); probed = Probe(stop, deadline)) {
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat("--chief=", address, ": stopped"));
    if (!absl::IsUnavailable(probed) && !absl::IsDeadlineExceeded(probed))
      return Annotate(probed, "--chief=" + address);
    const std::string problem = absl::StrCat("--chief=", address, ": ", ConnectionProblem(probed));
    if (Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat(problem, "; not reachable within ", FormatSeconds(deadline - began), " (--connect_timeout)"));
    }
    if (Now() - noticed >= kUnreachableEvery) {
      spdlog::warn("{}; retrying", problem);
      noticed = Now();
    }
    Mutex mutex;
    CondVar stopped;
    const std::stop_callback wake(stop, [&] { stopped.NotifyAll(); });
    MutexLock lock(mutex);
    stopped.WaitUntil(mutex, Now() + kRetry);
  }
  call_ = std::make_shared<Call>(*this);
  call_->Begin(registration);
  return absl::OkStatus();
}

void Follower::Report(const v1::ShardReport& report) {
  if (call_ != nullptr) call_->Send(report);
}

}  // namespace ps
