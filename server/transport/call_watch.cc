#include "server/transport/call_watch.h"

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/grpc_call.h"
#include "common/status.h"

namespace ps {
namespace {

// A call that is not served.
class Refused final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Refused(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

absl::Status CallWatch::Add(const void* call, std::string peer, std::function<void()> cancel) {
  MutexLock lock(mutex_);
  if (strangers_ >= limits_.strangers && !EvictIdle()) {
    return ResourceExhausted("the server has ", limits_.strangers,
                             " calls open that are not yet identified as a member's, its limit; retry later");
  }
  ++strangers_;
  Call& added = calls_[call];
  added = {.peer = std::move(peer), .cancel = std::move(cancel), .member = {}, .number = next_number_++};
  SetAwaited(added, true);
  return absl::OkStatus();
}

bool CallWatch::EvictIdle() {
  if (idle_.empty()) return false;
  Call& oldest = *idle_.begin()->second;
  Uncount(oldest);
  oldest.evicted = true;
  oldest.receive_by.reset();
  oldest.cancel();
  return true;
}

void CallWatch::Uncount(const Call& call) {
  --strangers_;
  idle_.erase(call.number);
}

void CallWatch::SetAwaited(Call& call, bool awaited) {
  if (awaited && call.stranger()) {
    idle_[call.number] = &call;
  } else {
    idle_.erase(call.number);
  }
}

void CallWatch::Remove(const void* call) {
  MutexLock lock(mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end()) return;
  if (found->second.stranger()) Uncount(found->second);
  if (found->second.member.has_value()) {
    if (const auto count = of_members_.find(*found->second.member); --count->second == 0) of_members_.erase(count);
  }
  calls_.erase(found);
}

absl::Status CallWatch::Identify(const void* call, uint32_t rank, uint64_t incarnation) {
  MutexLock lock(mutex_);
  Call* const found = Find(call);
  if (found == nullptr || !found->stranger()) return absl::OkStatus();
  size_t& count = of_members_[{rank, incarnation}];
  if (count >= limits_.of_a_member) {
    return ResourceExhausted("rank ", rank, " has ", count, " calls open, its limit; retry later");
  }
  ++count;
  Uncount(*found);
  found->member = {rank, incarnation};
  return absl::OkStatus();
}

void CallWatch::Adopt(const void* call) {
  MutexLock lock(mutex_);
  Call* const found = Find(call);
  if (found == nullptr || !found->stranger()) return;
  found->adopted = true;
  Uncount(*found);
}

void CallWatch::Receiving(const void* call, size_t bytes, TimePoint now) {
  MutexLock lock(mutex_);
  Call* const found = Find(call);
  if (found == nullptr || found->evicted) return;
  SetAwaited(*found, true);
  found->receiving = found->member.has_value();
  found->receive_by.reset();
  if (!found->receiving) found->receive_by = now + TimeFor(bytes);
}

void CallWatch::Received(const void* call) {
  MutexLock lock(mutex_);
  if (Call* const found = Find(call); found != nullptr) EndReceiving(*found);
}

void CallWatch::Sending(const void* call, size_t bytes, TimePoint now) {
  MutexLock lock(mutex_);
  Call* const found = Find(call);
  if (found == nullptr) return;
  SetAwaited(*found, false);
  found->send_by = now + TimeFor(bytes);
}

void CallWatch::Sent(const void* call) {
  MutexLock lock(mutex_);
  if (Call* const found = Find(call); found != nullptr) found->send_by.reset();
}

void CallWatch::Ending(const void* call, size_t bytes, TimePoint now) {
  Sending(call, bytes, now);
  Received(call);
}

void CallWatch::EndReceiving(Call& call) {
  SetAwaited(call, false);
  call.receiving = false;
  call.receive_by.reset();
}

void CallWatch::Tick(TimePoint now, const std::function<Members()>& members) {
  MutexLock lock(mutex_);
  const Members current = members();
  for (auto& [key, call] : calls_) {
    bool gone = false;
    if (call.receiving) {
      const auto member = current.find(call.member->first);
      gone = member == current.end() || member->second != call.member->second;
    }
    const auto late = [now](const std::optional<TimePoint>& deadline) {
      return deadline.has_value() && *deadline <= now;
    };
    if (!gone && !late(call.receive_by) && !late(call.send_by)) continue;
    const std::string who = call.member.has_value() ? absl::StrCat("rank ", call.member->first, " at ") : "";
    spdlog::warn("a call of {}{} is cancelled: {}", who, call.peer,
                 gone ? "its caller is no longer a member of the job" : "no progress for too long");
    EndReceiving(call);  // Once is enough.
    call.send_by.reset();
    call.cancel();
  }
}

size_t CallWatch::open_calls() const {
  MutexLock lock(mutex_);
  return calls_.size();
}

std::chrono::nanoseconds CallWatch::TimeFor(size_t bytes) const {
  return limits_.grace + std::chrono::milliseconds(1000 * bytes / limits_.bytes_per_s);
}

CallWatch::Call* CallWatch::Find(const void* call) {
  const auto found = calls_.find(call);
  return found == calls_.end() ? nullptr : &found->second;
}

void CallRouter::Handle(const std::string& path, Maker maker) {
  Check(makers_.emplace(path, std::move(maker)).second, "a path has one maker");
}

std::set<std::string> CallRouter::Services() const {
  std::set<std::string> services;
  for (const auto& [path, maker] : makers_) services.insert(path.substr(1, path.rfind('/') - 1));
  return services;
}

absl::Status CallRouter::RefusalOf(const std::string& path) const {
  for (const auto& [prefix, error] : refusals_) {
    if (path.starts_with(prefix)) return error;
  }
  return absl::UnimplementedError(absl::StrCat("unknown method ", path));
}

grpc::ServerGenericBidiReactor* CallRouter::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const auto maker = makers_.find(context->method());
  const absl::StatusOr<grpc::ServerGenericBidiReactor*> call =
      maker == makers_.end() ? RefusalOf(context->method()) : maker->second(*context);
  if (call.ok()) return *call;
  watch_.counts().AddEnded(call.status());
  return new Refused(call.status());
}

}  // namespace ps
