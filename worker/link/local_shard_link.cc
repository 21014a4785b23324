#include "worker/link/local_shard_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/half_floats.h"
#include "common/status.h"
#include "worker/link/call_messages.h"

namespace ps {
namespace {

constexpr size_t kMostRingBytes = 16 << 20;  // That a server may ask this client to map.
constexpr size_t kMostSlices = 4096;         // A message has no more.
// A message costs the server a wake-up, so that many slices that are small go together.
constexpr int64_t kPassedOnBytes = 256 << 10;

class LocalShardCall final : public ShardCall, public LocalCall, public std::enable_shared_from_this<LocalShardCall> {
 public:
  LocalShardCall(std::shared_ptr<LocalConnection> connection, CallRequest request, EndFunction on_end)
      : connection_(std::move(connection)),
        request_(std::move(request)),
        on_end_(std::move(on_end)),
        moved_at_(Now().time_since_epoch().count()),
        deadline_(Now() + request_.timeout) {}

  void Begin() override;
  void Send(const std::vector<uint32_t>& slices, bool last) override;
  void Cancel() override;
  TimePoint moved_at() const override { return TimePoint(TimePoint::duration(moved_at_.load())); }

  TimePoint deadline() const override { return deadline_; }
  void OnReply(const v1::LocalReply& reply, const std::shared_ptr<const SharedMemory>& weights,
               const std::shared_ptr<const void>& pin) override;
  void End(const absl::Status& status) override;

 private:
  void SendReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is ready is given to the server to read.
  void CountSent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountReceived(const std::vector<uint32_t>& slices) const;
  absl::Status CheckWeights(const SharedMemory& weights) const;
  // That a reply brings.
  std::vector<uint32_t> SlicesOfReply() const;
  void CopyWeights(const SharedMemory& weights, const std::vector<uint32_t>& slices);
  WeightsView ViewOf(const std::shared_ptr<const SharedMemory>& weights, std::shared_ptr<const void> pin) const;

  const std::shared_ptr<LocalConnection> connection_;
  CallRequest request_;  // Empty after the end.
  EndFunction on_end_;
  std::atomic<TimePoint::rep> moved_at_;
  const TimePoint deadline_;
  ShardReply reply_;  // For whoever takes replies.

  Mutex mutex_;
  uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 before Begin.
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool said_ ABSL_GUARDED_BY(mutex_) = false;  // The server knows of the call,
  bool sent_ ABSL_GUARDED_BY(mutex_) = false;  // and has got all of it, or the call has ended.
  std::vector<uint32_t> ready_ ABSL_GUARDED_BY(mutex_);
  int64_t ready_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool last_ ABSL_GUARDED_BY(mutex_) = false;
};

void LocalShardCall::Begin() {
  bool begun = false;
  {
    MutexLock lock(mutex_);
    number_ = connection_->Register(shared_from_this());
    begun = number_ != 0;
    if (begun && cancelled_) connection_->Cancel(number_);
    if (begun) SendReady();
  }
  if (!begun) End(LinkEnded());
}

void LocalShardCall::Send(const std::vector<uint32_t>& slices, bool last) {
  MutexLock lock(mutex_);
  ready_.insert(ready_.end(), slices.begin(), slices.end());
  for (const uint32_t slice : slices) ready_bytes_ += connection_->target().plan->slices()[slice].bytes();
  last_ = last_ || last;
  if (number_ != 0) SendReady();
}

void LocalShardCall::Cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  if (number_ != 0) connection_->Cancel(number_);
}

void LocalShardCall::SendReady() {
  const bool pushes = SendsSlices(request_.kind);
  if (sent_ || cancelled_ || (pushes && !last_ && ready_bytes_ < kPassedOnBytes)) return;
  const auto is_absent = [&](uint32_t slice) { return request_.absent(connection_->target().plan->slices()[slice]); };
  uint32_t memory = 0;
  if (!std::all_of(ready_.begin(), ready_.end(), is_absent)) memory = connection_->Tell(request_.shared->memory());
  size_t next = 0;
  CountSent();
  do {
    const size_t count = std::min(kMostSlices, ready_.size() - next);
    v1::LocalRequest request;
    request.set_call(number_);
    if (!std::exchange(said_, true)) {
      if (request_.kind == CallKind::kPull) *request.mutable_pull() = PullHeaderOf(request_);
      if (request_.kind == CallKind::kPush) *request.mutable_push() = PushHeaderOf(request_);
      if (request_.kind == CallKind::kPushPull) *request.mutable_push_pull() = PushHeaderOf(request_);
    }
    request.set_memory(memory);
    for (const size_t end = next + count; next < end; ++next) {
      (is_absent(ready_[next]) ? request.mutable_absent() : request.mutable_slices())->Add(ready_[next]);
    }
    sent_ = next == ready_.size() && (last_ || !pushes);
    request.set_last(sent_);
    connection_->Send(std::move(request));
  } while (next < ready_.size());
  ready_.clear();
  ready_bytes_ = 0;
  moved_at_ = Now().time_since_epoch().count();
}

void LocalShardCall::CountSent() {
  if (request_.traffic == nullptr || request_.shared == nullptr) return;
  uint64_t bytes = 0;
  for (const uint32_t index : ready_) {
    const SliceInfo& slice = connection_->target().plan->slices()[index];
    if (request_.absent(slice)) continue;
    const ModelMemory::Place place = request_.shared->model().slice(slice);
    bytes += place.positions + place.values;
  }
  request_.traffic->CountSent(Traffic::Link::kSharedMemory, bytes);
}

void LocalShardCall::CountReceived(const std::vector<uint32_t>& slices) const {
  if (request_.traffic == nullptr) return;
  uint64_t bytes = 0;
  for (const uint32_t index : slices) {
    bytes += static_cast<uint64_t>(connection_->target().plan->slices()[index].bytes());
  }
  request_.traffic->CountReceived(Traffic::Link::kSharedMemory, bytes);
}

absl::Status LocalShardCall::CheckWeights(const SharedMemory& weights) const {
  if (!ReceivesSlices(request_.kind)) return absl::InternalError("the server answered a push with weights");
  const SlicePlan& plan = *connection_->target().plan;
  const auto floats = static_cast<size_t>(plan.shard_buffer_elements(connection_->target().shard));
  if (weights.bytes().size() >= floats * sizeof(float)) return absl::OkStatus();
  return absl::InternalError("the server's memory does not hold its slices");
}

std::vector<uint32_t> LocalShardCall::SlicesOfReply() const {
  const SlicePlan& plan = *connection_->target().plan;
  const uint32_t shard = connection_->target().shard;
  if (request_.kind == CallKind::kPull) return plan.shard_slices(shard);
  std::vector<uint32_t> slices = plan.pushed_shard_slices(shard);
  if (request_.carries != nullptr) {
    std::erase_if(slices, [this](uint32_t slice) { return !Contain(*request_.carries, slice); });
  }
  return slices;
}

void LocalShardCall::CopyWeights(const SharedMemory& weights, const std::vector<uint32_t>& slices) {
  const SlicePlan& plan = *connection_->target().plan;
  for (const uint32_t index : slices) {
    const SliceInfo& slice = plan.slices()[index];
    if (request_.wants_slice && !request_.wants_slice(index)) continue;
    const uint8_t* const from = weights.bytes().data() + static_cast<size_t>(slice.shard_offset) * sizeof(float);
    float* const to = (*request_.in)[slice.tensor].data() + slice.offset;
    const WireType type = WireTypeOf(plan.layout()[slice.tensor].kind, request_.weights);
    if (type == WireType::kFloat32) {
      std::memcpy(to, from, static_cast<size_t>(slice.bytes()));
    } else {  // They come out as they would over gRPC. The server has looked whether they can be rounded.
      (void)RoundThrough(reinterpret_cast<const float*>(from), static_cast<size_t>(slice.elements), type, to,
                         BestIsa());
    }
    if (request_.on_slice) request_.on_slice(index);
  }
}

std::shared_ptr<const std::span<const std::byte>> PagesOf(const std::shared_ptr<const SharedMemory>& memory) {
  struct Pages {
    std::shared_ptr<const SharedMemory> memory;
    std::span<const std::byte> bytes;
  };
  const auto pages = std::make_shared<const Pages>(Pages{memory, std::as_bytes(memory->bytes())});
  return {pages, &pages->bytes};
}

// Slices of one tensor follow each other without a gap: all but the last are whole.
WeightsView LocalShardCall::ViewOf(const std::shared_ptr<const SharedMemory>& weights,
                                   std::shared_ptr<const void> pin) const {
  const SlicePlan& plan = *connection_->target().plan;
  WeightsView view = {.tensors = {}, .pin = std::move(pin), .pages = PagesOf(weights)};
  for (const SliceInfo& slice : plan.slices()) {
    if (slice.offset != 0) continue;
    const auto* const floats = reinterpret_cast<const float*>(weights->bytes().data());
    view.tensors.emplace_back(floats + slice.shard_offset, static_cast<size_t>(plan.layout()[slice.tensor].elements()));
  }
  return view;
}

void LocalShardCall::OnReply(const v1::LocalReply& reply, const std::shared_ptr<const SharedMemory>& weights,
                             const std::shared_ptr<const void>& pin) {
  const TimePoint now = Now();
  moved_at_ = now.time_since_epoch().count();
  reply_.first_reply_at = now;
  reply_.moved_at = now;  // What was written here nobody may have read.
  if (reply.code() != 0) return End(absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.error()));
  absl::Status status;
  if (reply.has_push()) TakePush(reply.push(), /*only=*/true, &reply_);
  if (reply.has_pull()) status = TakePull(reply.pull(), &reply_);
  if (status.ok() && weights != nullptr) status = CheckWeights(*weights);
  if (status.ok() && weights != nullptr) {
    const std::vector<uint32_t> slices = SlicesOfReply();
    reply_.slices = slices.size();
    CountReceived(slices);
    if (request_.view) {
      reply_.view = ViewOf(weights, pin);
    } else {
      CopyWeights(*weights, slices);
    }
  }
  End(status);
}

void LocalShardCall::End(const absl::Status& status) {
  std::exchange(on_end_, nullptr)(status, reply_);
  reply_ = {};
  CallRequest ended;  // Lets go of the memory, without the lock.
  MutexLock lock(mutex_);
  sent_ = true;
  std::swap(ended, request_);
}

class LocalShardLink final : public ShardLink {
 public:
  explicit LocalShardLink(std::shared_ptr<LocalConnection> connection) : connection_(std::move(connection)) {
    connection_->Start();
  }
  ~LocalShardLink() override { connection_->Stop(); }
  const std::string& address() const override { return connection_->target().address; }
  bool works() const override { return !connection_->ended(); }
  bool can_view() const override {
    return connection_->allows_views && connection_->target().plan->num_shards() == 1 && works();
  }
  bool takes(const SharedTensors& gradients) const override { return connection_->Takes(gradients.memory()); }
  bool server_looks() const override { return connection_->applies_in_place && works(); }
  bool TakeReplies(const std::function<bool()>& over, TimePoint deadline) override {
    return connection_->TakeReplies(over, deadline);
  }
  void WakeTaker() override { connection_->WakeTaker(); }
  std::shared_ptr<ShardCall> MakeCall(CallRequest request, ShardCall::EndFunction on_end) override {
    return std::make_shared<LocalShardCall>(connection_, std::move(request), std::move(on_end));
  }

 private:
  const std::shared_ptr<LocalConnection> connection_;
};

constexpr size_t kMostMemories = 64;  // A server shares no more.
constexpr size_t kMostTold = 7;       // The client shares no more; a server keeps eight.
constexpr std::chrono::seconds kFileWait(5);
constexpr std::chrono::hours kIdle(1);
constexpr std::chrono::milliseconds kReleaseAfter(100);
constexpr std::chrono::milliseconds kTurn(5);  // The thread takes replies when no caller has for so long.

}  // namespace

absl::StatusOr<std::unique_ptr<ShardLink>> ConnectLocally(const LocalTarget& target, TimePoint deadline) {
  PS_ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(target.socket, deadline));
  v1::LocalHello hello;
  hello.set_protocol(v1::PROTOCOL_VERSION_1);
  *hello.mutable_id() = target.id;
  hello.set_shard(target.shard);
  hello.set_takes_bell(true);
  PS_RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, deadline));
  PS_ASSIGN_OR_RETURN(std::optional<LocalSocket::Message> answer, socket.Receive(deadline));
  v1::LocalWelcome welcome;
  if (!answer.has_value()) return absl::AbortedError("the server closed the connection");
  if (!welcome.ParseFromString(answer->text)) return absl::InternalError("the server's greeting is no LocalWelcome");
  if (!welcome.refused().empty()) return absl::FailedPreconditionError(welcome.refused());
  if (answer->files.size() == 1) {
    return absl::UnimplementedError("the server is of an earlier release, which workers wake in another way");
  }
  if (answer->files.size() != 2 || !LocalChannel::IsBell(answer->files.back()) || welcome.ring_bytes() == 0 ||
      welcome.ring_bytes() % 64 != 0 || welcome.ring_bytes() > kMostRingBytes) {
    return absl::InternalError("the server's greeting makes no sense");
  }
  PS_ASSIGN_OR_RETURN(SharedMemory rings,
                      LocalChannel::AttachRings(std::move(answer->files.front()), welcome.ring_bytes()));
  return std::make_unique<LocalShardLink>(std::make_shared<LocalConnection>(target, std::move(socket), std::move(rings),
                                                                            std::move(answer->files.back()), welcome));
}

uint64_t LocalConnection::Register(const std::shared_ptr<LocalCall>& call) {
  uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    if (ended_) return 0;
    number = ++last_call_;
    calls_[number] = call;
  }
  MutexLock lock(turn_mutex_);
  if (sleeps_long_ && !caller_) turn_left_.NotifyAll();  // Perhaps nobody waits for this one.
  return number;
}

void LocalConnection::Release(uint64_t call) {
  MutexLock lock(mutex_);
  released_.push_back(call);
}

void LocalConnection::SendReleased() {
  {
    MutexLock lock(mutex_);
    if (released_.empty()) return;
  }
  Send({});
}

void LocalConnection::Send(v1::LocalRequest request) {
  {
    MutexLock lock(mutex_);
    request.mutable_released()->Add(released_.begin(), released_.end());
    released_.clear();
  }
  if (!channel_.Send(request.SerializeAsString()).ok()) channel_.Close();
}

bool LocalConnection::Takes(const SharedMemory& memory) {
  MutexLock lock(mutex_);
  return told_.size() < kMostTold || told_.contains(memory.identity());
}

uint32_t LocalConnection::Tell(const SharedMemory& memory) {
  MutexLock lock(mutex_);
  const auto [known, is_new] = told_.emplace(memory.identity(), static_cast<uint32_t>(told_.size() + 1));
  if (!is_new) return known->second;
  v1::LocalFile about;
  about.set_memory(known->second);
  about.set_bytes(memory.bytes().size());
  if (!channel_.SendFile(about.SerializeAsString(), memory.file()).ok()) channel_.Close();
  return known->second;
}

void LocalConnection::Cancel(uint64_t call) {
  {
    MutexLock lock(mutex_);
    if (!calls_.contains(call)) return;
    cancelled_.push_back(call);
  }
  SendCancel(call);
  channel_.WakeReceiver();
}

void LocalConnection::SendCancel(uint64_t call) {
  v1::LocalRequest request;
  request.set_call(call);
  request.set_cancel(true);
  Send(std::move(request));
}

std::shared_ptr<LocalCall> LocalConnection::Extract(uint64_t call) {
  MutexLock lock(mutex_);
  auto found = calls_.extract(call);
  return found.empty() ? nullptr : std::move(found.mapped());
}

TimePoint LocalConnection::EndCalls() {
  std::vector<std::pair<std::shared_ptr<LocalCall>, absl::Status>> over;
  std::vector<uint64_t> expired;
  const TimePoint now = Now();
  TimePoint next = now + kIdle;
  {
    MutexLock lock(mutex_);
    for (const uint64_t call : std::exchange(cancelled_, {})) {
      if (auto found = calls_.extract(call); !found.empty()) {
        over.emplace_back(std::move(found.mapped()), absl::CancelledError("the call was cancelled"));
      }
    }
    for (auto call = calls_.begin(); call != calls_.end();) {
      if (call->second->deadline() > now) {
        next = std::min(next, call->second->deadline());
        ++call;
        continue;
      }
      expired.push_back(call->first);
      over.emplace_back(std::move(call->second), absl::DeadlineExceededError("the server did not answer in time"));
      call = calls_.erase(call);
    }
  }
  for (const uint64_t call : expired) SendCancel(call);
  for (const auto& [call, status] : over) call->End(status);
  return next;
}

bool LocalConnection::TakeReplies(const std::function<bool()>& over, TimePoint deadline) {
  {
    MutexLock lock(turn_mutex_);
    if (caller_ || over_ || Now() >= deadline) return false;
    caller_ = true;
    if (taken_) channel_.WakeReceiver();
    while (taken_ && !over_ && turn_left_.WaitUntil(turn_mutex_, deadline)) {
    }
    if (taken_ || over_) {
      caller_ = false;
      turn_left_.NotifyAll();
      return false;
    }
    taken_ = true;
  }
  bool goes_on = true;
  while (goes_on && !over() && Now() < deadline) goes_on = Take(deadline);
  bool others_wait = false;
  {
    MutexLock lock(mutex_);
    others_wait = !calls_.empty();
  }
  LeaveTurn(goes_on, others_wait ? TimePoint() : Now() + kTurn);
  return true;
}

bool LocalConnection::AwaitTurn() {
  MutexLock lock(turn_mutex_);
  std::chrono::nanoseconds pause = kTurn;
  while (!over_ && (taken_ || caller_ || Now() < thread_from_)) {
    sleeps_long_ = pause > kTurn;
    turn_left_.WaitUntil(turn_mutex_, Now() + pause);
    pause = caller_ ? std::min<std::chrono::nanoseconds>(2 * pause, kReleaseAfter) : kTurn;
  }
  sleeps_long_ = false;
  taken_ = !over_;
  return taken_;
}

// A caller that leaves nothing behind wakes nobody: mostly it comes back soon.
void LocalConnection::LeaveTurn(bool goes_on, std::optional<TimePoint> thread_from) {
  MutexLock lock(turn_mutex_);
  const bool is_caller = thread_from.has_value();
  taken_ = false;
  over_ = over_ || !goes_on;
  if (is_caller) caller_ = false;
  thread_from_ = thread_from.value_or(TimePoint());
  if (!is_caller || over_ || thread_from_ == TimePoint()) turn_left_.NotifyAll();
}

bool LocalConnection::Take(TimePoint deadline) {
  const absl::StatusOr<std::optional<std::string>> message = channel_.Receive();
  why_ = message.status();
  if (why_.ok() && message->has_value()) why_ = OnReply(**message);
  if (!why_.ok()) return false;  // CANCELLED: it was closed here.
  if (message->has_value() && Now() < end_calls_at_) return true;
  const TimePoint began = Now();
  const TimePoint next = std::min(EndCalls(), began + kReleaseAfter);
  end_calls_at_ = began + kReleaseAfter;
  if (message->has_value()) return true;
  if (!channel_.Wait(std::min(next, deadline))) return false;
  if (Now() >= began + kReleaseAfter) SendReleased();
  return true;
}

void LocalConnection::Run() {
  while (AwaitTurn()) LeaveTurn(Take(TimePoint::max()), /*thread_from=*/std::nullopt);
  channel_.Close();
  std::map<uint64_t, std::shared_ptr<LocalCall>> calls;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    calls.swap(calls_);
  }
  if (!stopped_ && target_.on_lost) {
    const std::string reason = why_.ok() || absl::IsCancelled(why_) ? "" : absl::StrCat(" (", Message(why_), ")");
    target_.on_lost(absl::StrCat("the link through shared memory has ended", reason, "; using gRPC"));
  }
  for (const auto& [number, call] : calls) call->End(LinkEnded());
}

absl::Status LocalConnection::OnReply(const std::string& message) {
  v1::LocalReply reply;
  if (!reply.ParseFromString(message)) return absl::InternalError("a message is no LocalReply");
  std::shared_ptr<const SharedMemory> weights;
  std::shared_ptr<const void> pin;
  if (reply.memory() != 0) {
    PS_ASSIGN_OR_RETURN(weights, MemoryOf(reply.memory()));
    pin = std::shared_ptr<const void>(
        weights.get(), [self = shared_from_this(), call = reply.call()](const void*) { self->Release(call); });
  }
  // It may have ended here meanwhile.
  const std::shared_ptr<LocalCall> call = Extract(reply.call());
  if (call != nullptr) call->OnReply(reply, weights, pin);
  const bool copied = pin.use_count() == 1;
  pin.reset();
  if (copied) SendReleased();  // Else it is read until the next message, or long after it.
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const SharedMemory>> LocalConnection::MemoryOf(uint32_t number) {
  const TimePoint deadline = Now() + kFileWait;
  for (;;) {
    if (const auto known = memories_.find(number); known != memories_.end()) return known->second;
    if (memories_.size() == kMostMemories) return absl::InternalError("too many pieces of memory");
    PS_ASSIGN_OR_RETURN(LocalSocket::Message sent, channel_.ReceiveFile(deadline));
    v1::LocalFile about;
    if (!about.ParseFromString(sent.text)) return absl::InternalError("a descriptor came without a LocalFile");
    PS_ASSIGN_OR_RETURN(SharedMemory attached, SharedMemory::Attach("a shard's weights", std::move(sent.files.front()),
                                                                    about.bytes(), SharedMemory::Access::kRead));
    auto memory = std::make_shared<const SharedMemory>(std::move(attached));
    if (!memories_.emplace(about.memory(), std::move(memory)).second) {
      return absl::InternalError("the same memory was sent twice");
    }
  }
}

void LocalConnection::Stop() {
  stopped_ = true;
  channel_.Close();
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  thread_.join();
}

}  // namespace ps
