#include "worker/client/local_connection.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kMostMemories = 64;  // Of the server.
constexpr size_t kMostTold = 7;       // Of the client; a server keeps eight.
constexpr std::chrono::seconds kFileWait(5);
constexpr std::chrono::hours kIdle(1);
constexpr std::chrono::milliseconds kReleaseAfter(100);

}  // namespace

uint64_t LocalConnection::Register(const std::shared_ptr<LocalCall>& call) {
  MutexLock lock(mutex_);
  if (ended_) return 0;
  calls_[++last_call_] = call;
  return last_call_;
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

std::shared_ptr<LocalCall> LocalConnection::Take(uint64_t call) {
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

void LocalConnection::Run() {
  TimePoint end_calls_at = Now();
  absl::Status why;  // It has ended, unless the server has.
  for (;;) {
    const absl::StatusOr<std::optional<std::string>> message = channel_.Receive();
    why = message.status();
    if (why.ok() && message->has_value()) why = OnReply(**message);
    if (!why.ok()) break;  // CANCELLED: it was closed here.
    if (message->has_value() && Now() < end_calls_at) continue;
    const TimePoint began = Now();
    const TimePoint next = std::min(EndCalls(), began + kReleaseAfter);
    end_calls_at = began + kReleaseAfter;
    if (message->has_value()) continue;
    if (!channel_.Wait(next)) break;
    if (Now() >= began + kReleaseAfter) SendReleased();
  }
  channel_.Close();
  std::map<uint64_t, std::shared_ptr<LocalCall>> calls;
  {
    MutexLock lock(mutex_);
    ended_ = true;
    calls.swap(calls_);
  }
  if (!stopped_ && target_.on_lost) {
    const std::string reason = why.ok() || absl::IsCancelled(why) ? "" : absl::StrCat(" (", Message(why), ")");
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
    const absl::StatusOr<std::shared_ptr<const SharedMemory>> memory = MemoryOf(reply.memory());
    if (!memory.ok()) return memory.status();
    weights = *memory;
    pin = std::shared_ptr<const void>(
        weights.get(), [self = shared_from_this(), call = reply.call()](const void*) { self->Release(call); });
  }
  // It may have ended here meanwhile.
  const std::shared_ptr<LocalCall> call = Take(reply.call());
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
    absl::StatusOr<LocalSocket::Message> sent = channel_.ReceiveFile(deadline);
    if (!sent.ok()) return sent.status();
    v1::LocalFile about;
    if (!about.ParseFromString(sent->text)) return absl::InternalError("a descriptor came without a LocalFile");
    absl::StatusOr<SharedMemory> attached = SharedMemory::Attach("a shard's weights", std::move(sent->files.front()),
                                                                 about.bytes(), SharedMemory::Access::kRead);
    if (!attached.ok()) return attached.status();
    auto memory = std::make_shared<const SharedMemory>(*std::move(attached));
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
