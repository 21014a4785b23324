#include "server/follower.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/connection_problem.h"
#include "common/grpc_status.h"
#include "common/self_owned.h"
#include "server/follow_queues.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kRetry(100);
constexpr std::chrono::seconds kProbe(10);
constexpr std::chrono::seconds kUnreachableEvery(3);

}  // namespace

class Follower::Call final : public grpc::ClientBidiReactor<v1::ShardReport, v1::ChiefUpdate>, public SelfOwned<Call> {
 public:
  explicit Call(Follower& follower) : stub_(follower.channel_), follower_(follower) {}

  void Begin(const v1::Registration& registration) {
    Hold();
    stub_.async()->Follow(&context_, this);
    AddHold();  // Reports come from outside of the call's reactions.
    StartRead(&update_);
    {
      MutexLock lock(mutex_);
      *outgoing_.mutable_registration() = registration;
      writing_ = true;
      StartWrite(&outgoing_);
    }
    StartCall();
  }

  void Send(const v1::ShardReport& report) {
    {
      MutexLock lock(mutex_);
      if (ended_ || !failure_.ok()) return;
      failure_ = queue_.Add(report);
      if (failure_.ok()) return WriteNext();
    }
    context_.TryCancel();
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
    writing_ = false;
    if (!ended_) WriteNext();
  }

  void OnDone(const grpc::Status& status) override {
    absl::Status end;
    {
      MutexLock lock(mutex_);
      end = failure_.ok() ? FromGrpc(status) : failure_;
    }
    follower_.on_end_(end);
    {
      MutexLock lock(mutex_);
      done_ = true;
    }
    finished_.NotifyAll();
    Release();
  }

  void CancelAndWait() {
    context_.TryCancel();
    MutexLock lock(mutex_);
    while (!done_) finished_.Wait(mutex_);  // gRPC ends a cancelled call at once.
  }

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    std::optional<v1::ShardReport> next = queue_.Take();
    if (!next.has_value()) return;
    outgoing_ = *std::move(next);
    writing_ = true;
    StartWrite(&outgoing_);
  }

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
  Mutex mutex_;
  CondVar finished_;
  v1::ShardReport outgoing_ ABSL_GUARDED_BY(mutex_);  // While it is written, gRPC's.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  ReportQueue queue_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // Why this side ended the stream, if it did.
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
                             const std::stop_token& stop, const std::string& flag) {
  const TimePoint began = Now();
  TimePoint noticed;
  for (absl::Status probed = Probe(stop, deadline); !probed.ok(); probed = Probe(stop, deadline)) {
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat("--chief=", address, ": stopped"));
    if (!absl::IsUnavailable(probed) && !absl::IsDeadlineExceeded(probed))
      return Annotate(probed, "--chief=" + address);
    const std::string problem = absl::StrCat("--chief=", address, ": ", ConnectionProblem(probed));
    if (Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat(problem, "; not reachable within ", FormatSeconds(deadline - began), " (", flag, ")"));
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
