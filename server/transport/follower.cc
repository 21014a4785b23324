#include "server/transport/follower.h"

#include <atomic>
#include <optional>
#include <random>
#include <utility>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/codec.h"
#include "common/grpc_call.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kRetry(100);
constexpr std::chrono::seconds kProbe(10);
constexpr std::chrono::seconds kUnreachableEvery(3);
constexpr std::chrono::seconds kAnswerMargin(1);

}  // namespace

// One connection's part of the stream.
class Follower::Call final : public grpc::ClientBidiReactor<v1::ShardReport, v1::ChiefUpdate>, public SelfOwned<Call> {
 public:
  explicit Call(Follower& follower) : stub_(follower.channel_), follower_(follower) {}

  void Begin(const v1::Registration& registration) {
    Hold();
    stub_.async()->Follow(&context_, this);
    AddHold();  // Reports come from outside of the call's reactions.
    StartRead(&update_);
    *outgoing_.mutable_registration() = registration;
    StartWrite(&outgoing_);
    StartCall();
  }

  // One at a time, and none once OnClosed was called.
  void Write(v1::ShardReport report) {
    outgoing_ = std::move(report);
    StartWrite(&outgoing_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Close();
    follower_.OnUpdate(update_);
    update_.Clear();
    StartRead(&update_);
  }

  void OnWriteDone(bool ok) override { ok ? follower_.OnWritten() : Close(); }

  void OnDone(const grpc::Status& status) override {
    follower_.OnDone(FromGrpc(status));
    {
      MutexLock lock(mutex_);
      done_ = true;
    }
    finished_.NotifyAll();
    Release();
  }

  void Cancel() { context_.TryCancel(); }
  void CancelAndWait() {
    Cancel();
    MutexLock lock(mutex_);
    while (!done_) finished_.Wait(mutex_);  // gRPC ends a cancelled call at once.
  }

 private:
  void Close() {
    if (closed_.exchange(true)) return;
    follower_.OnClosed();
    RemoveHold();
  }

  v1::Chief::Stub stub_;
  Follower& follower_;
  grpc::ClientContext context_;
  v1::ChiefUpdate update_;
  v1::ShardReport outgoing_;
  std::atomic<bool> closed_ = false;
  Mutex mutex_;
  CondVar finished_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

class Follower::CheckpointAsked {
 public:
  CheckpointAsked(const std::shared_ptr<grpc::Channel>& chief, std::chrono::milliseconds wait,
                  std::function<void(const absl::Status&)> callback)
      : stub_(chief) {
    request_.set_wait_ms(static_cast<uint32_t>(wait.count()));
    context_.set_deadline(std::chrono::system_clock::now() + wait + kAnswerMargin);
    stub_.async()->Checkpoint(&context_, &request_, &reply_, [this, callback](const grpc::Status& status) {
      callback(FromGrpc(status));
      MutexLock lock(mutex_);
      done_ = true;
      ended_.NotifyAll();
    });
  }
  ~CheckpointAsked() {
    context_.TryCancel();
    MutexLock lock(mutex_);
    while (!done_) ended_.Wait(mutex_);
  }
  CheckpointAsked(const CheckpointAsked&) = delete;
  CheckpointAsked& operator=(const CheckpointAsked&) = delete;

 private:
  v1::Chief::Stub stub_;
  grpc::ClientContext context_;
  v1::CheckpointRequest request_;
  v1::CheckpointReply reply_;
  Mutex mutex_;
  CondVar ended_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

Follower::~Follower() { Stop(); }

Follower::Follower(std::shared_ptr<grpc::Channel> chief, std::chrono::nanoseconds patience, Callbacks callbacks)
    : channel_(std::move(chief)), patience_(patience), callbacks_(std::move(callbacks)) {}

// ---- The stream

void Follower::Open() {
  v1::Registration registration = registration_;
  std::shared_ptr<Call> call;
  {
    MutexLock lock(mutex_);
    if (over_) return;
    call = call_ = std::make_shared<Call>(*this);
    in_call_ = true;
    closed_ = false;
    writing_ = true;  // The registration.
    registration.set_resumes(generation_);
    registration.set_received(end_.received());
  }
  call->Begin(registration);
}

void Follower::OnUpdate(const v1::ChiefUpdate& update) {
  bool resumed = false;
  bool is_new = false;
  {
    MutexLock lock(mutex_);
    resumed = !open_ && registered_;
    end_.OnReceived(update.received());
    if (!open_)
      end_.ForEachKept([this](const v1::ShardReport& report) {
        mutex_.AssertHeld();
        again_.push_back(report);
      });
    open_ = registered_ = true;
    if (update.has_view()) generation_ = update.view().generation();
    if (update.view().phase() == v1::PHASE_FINISHED) all_written_ = false;  // The shard's answer is to come.
    is_new = end_.Receive(update.number());
    WriteNext();
  }
  if (resumed) callbacks_.on_connection(absl::OkStatus());
  if (is_new) callbacks_.on_update(update);
}

void Follower::OnWritten() {
  MutexLock lock(mutex_);
  writing_ = false;
  WriteNext();
}

void Follower::WriteNext() {
  if (writing_ || closed_ || !open_) return;
  v1::ShardReport report;
  if (!again_.empty()) {
    report = std::move(again_.front());
    again_.pop_front();
  } else if (std::optional<v1::ShardReport> next = queue_.Take(); next.has_value()) {
    report = *std::move(next);
    // A status is not sent again: a later one says more.
    report.has_status() ? end_.Tell(&report) : end_.Add(&report);
  } else if (end_.MustTell()) {
    end_.Tell(&report);
  } else {
    all_written_ = true;
    return;
  }
  writing_ = true;
  call_->Write(std::move(report));
}

void Follower::OnClosed() {
  MutexLock lock(mutex_);
  closed_ = true;
}

bool Follower::MayResume(const absl::Status& status) const {
  const bool broke =
      status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
  return registered_ && !over_ && failure_.ok() && broke && end_.resumable() &&
         (stays_on_ || Now() - broke_at_ <= patience_);
}

void Follower::OnDone(const absl::Status& status) {
  bool was_open = false;
  bool resume = false;
  absl::Status end = status;
  {
    MutexLock lock(mutex_);
    was_open = std::exchange(open_, false);
    if (was_open) broke_at_ = Now();
    again_.clear();
    resume = MayResume(status);
    if (!failure_.ok()) end = failure_;
    if (!resume) over_ = true;
  }
  if (!resume) {
    callbacks_.on_end(end);
  } else if (was_open) {
    callbacks_.on_connection(end);
  }
  MutexLock lock(mutex_);
  broke_ = end;
  retry_at_ = Now() + kRetry;
  in_call_ = false;  // Last: then the next call may begin.
}

void Follower::Tick(TimePoint now) {
  absl::Status broke;
  bool expired = false;
  {
    MutexLock lock(mutex_);
    if (over_ || open_ || !registered_) return;
    expired = !failure_.ok() || (!stays_on_ && now - broke_at_ > patience_);
    if (in_call_ && expired) return call_->Cancel();
    if (in_call_ || (!expired && now < retry_at_)) return;
    over_ = expired;
    broke = failure_.ok() ? broke_ : failure_;
  }
  expired ? callbacks_.on_end(broke) : Open();
}

void Follower::AskForCheckpoint(std::chrono::milliseconds wait, std::function<void(const absl::Status&)> callback) {
  MutexLock lock(mutex_);
  if (asked_ == nullptr) asked_ = std::make_unique<CheckpointAsked>(channel_, wait, std::move(callback));
}

void Follower::StayOn() {
  MutexLock lock(mutex_);
  stays_on_ = true;
}

bool Follower::AllWritten() {
  MutexLock lock(mutex_);
  return all_written_;
}

void Follower::Stop() {
  std::shared_ptr<Call> call;
  std::unique_ptr<CheckpointAsked> asked;
  {
    MutexLock lock(mutex_);
    over_ = true;
    call = call_;
    asked = std::move(asked_);
  }
  asked.reset();
  if (call != nullptr) call->CancelAndWait();
}

void Follower::Report(const v1::ShardReport& report) {
  std::shared_ptr<Call> failed;
  {
    MutexLock lock(mutex_);
    if (over_ || !failure_.ok()) return;
    failure_ = queue_.Add(report);
    all_written_ = false;
    if (failure_.ok()) return WriteNext();
    failed = call_;
  }
  if (failed != nullptr) failed->Cancel();
}

// ---- The first call

// Any answer shows that the chief is reachable; an error says what is wrong.
absl::Status Follower::Probe(const std::stop_token& stop, TimePoint deadline) const {
  grpc::ClientContext context;
  SetDeadline(context, std::min<std::chrono::nanoseconds>(kProbe, deadline - Now()));
  const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
  v1::StatusReply reply;
  return FromGrpc(v1::Chief::NewStub(channel_)->Status(&context, v1::StatusRequest(), &reply));
}

absl::Status Follower::Start(const v1::Registration& registration, const std::string& address, TimePoint deadline,
                             const std::stop_token& stop, const std::string& flag) {
  const TimePoint began = Now();
  TimePoint noticed;
  for (absl::Status probed = Probe(stop, deadline); !probed.ok(); probed = Probe(stop, deadline)) {
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat("--chief=", address, ": stopped"));
    // CANCELLED: the chief begins another generation just now.
    if (!absl::IsUnavailable(probed) && !absl::IsDeadlineExceeded(probed) && !absl::IsCancelled(probed)) {
      return Annotate(probed, "--chief=" + address);
    }
    const std::string problem = absl::StrCat("--chief=", address, ": ", ConnectionProblem(probed));
    if (Now() >= deadline) {
      return Unavailable(problem, "; not reachable within ", FormatSeconds(deadline - began), " (", flag, ")");
    }
    if (Now() - noticed >= kUnreachableEvery) {
      spdlog::warn("{}; retrying", problem);
      noticed = Now();
    }
    PauseUntil(Now() + kRetry, stop);
  }
  registration_ = registration;
  std::random_device random;
  registration_.set_process((uint64_t{random()} << 32 | random()) | 1);
  Open();
  return absl::OkStatus();
}

absl::Status UpdateQueue::Add(const v1::ChiefUpdate& update) {
  grpc::ByteBuffer encoded = EncodeMessage(update);
  const size_t bytes = encoded.Length();
  if (!updates_.empty() && (updates_.size() >= limits_.messages || bytes_ + bytes > limits_.bytes)) {
    return ResourceExhausted("the shard does not read the chief's updates: ", updates_.size(), " of ", bytes_,
                             " bytes wait for it, the limit");
  }
  bytes_ += bytes;
  updates_.push_back(std::move(encoded));
  return absl::OkStatus();
}

std::optional<grpc::ByteBuffer> UpdateQueue::Take() {
  if (updates_.empty()) return std::nullopt;
  grpc::ByteBuffer update;
  update.Swap(&updates_.front());
  updates_.pop_front();
  bytes_ -= update.Length();
  return update;
}

absl::Status ReportQueue::Add(const v1::ShardReport& report) {
  Check(!report.has_registration(), "a registration is the first report of its stream, and nothing is merged into it");
  if (report.has_status()) {
    status_ = report;
    return absl::OkStatus();
  }
  if (!waiting_.has_value()) waiting_ = v1::ShardReport();
  const size_t pushes = static_cast<size_t>(waiting_->complete_size()) + static_cast<size_t>(report.complete_size());
  if (pushes > kMaxPushes || norms_.size() + static_cast<size_t>(report.norms_size()) > kMaxPushes) {
    return ResourceExhausted("the chief does not read this shard's reports: ", waiting_->complete_size(),
                             " complete pushes and the norms of ", norms_.size(), " wait for it, the limit");
  }
  norms_.insert(norms_.end(), report.norms().begin(), report.norms().end());
  v1::ShardReport earlier = std::exchange(*waiting_, report);
  earlier.mutable_complete()->MergeFrom(report.complete());
  waiting_->mutable_complete()->Swap(earlier.mutable_complete());
  waiting_->clear_norms();
  if (!earlier.failure().empty()) {
    waiting_->set_failure(earlier.failure());
    waiting_->set_not_finite(earlier.not_finite());
  }
  if (!earlier.restore_failure().empty()) waiting_->set_restore_failure(earlier.restore_failure());
  // What came of an earlier checkpoint, of which a disk was slow to tell, is of no use any more.
  const bool later = earlier.checkpoint().number() > waiting_->checkpoint().number();
  if (later) waiting_->mutable_checkpoint()->Swap(earlier.mutable_checkpoint());
  // The last one that says anything of a cut: one phase begins when the one before is reported.
  if (!waiting_->has_cut() && earlier.has_cut()) *waiting_->mutable_cut() = std::move(*earlier.mutable_cut());
  return absl::OkStatus();
}

std::optional<v1::ShardReport> ReportQueue::Take() {
  if (!waiting_.has_value()) return std::exchange(status_, std::nullopt);
  v1::ShardReport report = *waiting_;
  size_t bytes = 0;
  while (!norms_.empty()) {
    bytes += norms_.front().ByteSizeLong();
    if (report.norms_size() > 0 && bytes > kMaxNormBytes) break;
    *report.add_norms() = std::move(norms_.front());
    norms_.pop_front();
  }
  if (norms_.empty()) {
    waiting_.reset();
  } else {
    waiting_->clear_complete();
    waiting_->clear_failure();
    waiting_->clear_cut();
    waiting_->clear_checkpoint();
    waiting_->clear_restore_failure();
  }
  return report;
}

}  // namespace ps
