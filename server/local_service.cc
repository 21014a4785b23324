#include "server/local_service.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kPause(100);  // After an error of accepting.
constexpr std::chrono::hours kAcceptFor(1);
constexpr size_t kMostStrangers = 256;  // Callers that have not said yet who they are.
constexpr std::chrono::seconds kWarnEvery(10);

}  // namespace

absl::Status LocalService::CheckSupported() {
  const auto tried = SharedMemory::Create("a first page", sizeof(float), SharedMemory::Access::kRead);
  return Annotate(tried.status(), "--shared_memory");
}

absl::StatusOr<std::unique_ptr<LocalService>> LocalService::Start(Shard& shard, const WaitLimits& limits,
                                                                  const std::string& path) {
  std::unique_ptr<UnixLock> path_lock;
  std::string at;  // As workers in other folders find it.
  if (!path.empty()) {
    at = std::filesystem::absolute(path).string();
    absl::StatusOr<std::unique_ptr<UnixLock>> lock = UnixLock::Take("--local_socket=" + path, at);
    if (!lock.ok()) return lock.status();
    path_lock = *std::move(lock);
    unlink(at.c_str());  // Of a server that was killed.
  }
  absl::StatusOr<LocalListener> listener = LocalListener::Listen(at);
  if (!listener.ok()) return Annotate(listener.status(), path.empty() ? "--shared_memory" : "--local_socket");
  return std::unique_ptr<LocalService>(new LocalService(shard, limits, std::move(path_lock), *std::move(listener)));
}

LocalService::LocalService(Shard& shard, const WaitLimits& limits, std::unique_ptr<UnixLock> path_lock,
                           LocalListener listener)
    : shard_(shard),
      limits_(limits),
      path_lock_(std::move(path_lock)),
      listener_(std::move(listener)),
      accepting_([this] { Accept(); }) {}

LocalService::~LocalService() {
  Entries entries;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (const Entry& entry : entries_) entry.link->Close();
  }
  stop_.NotifyAll();
  listener_.Shutdown();
  accepting_.join();
  {
    MutexLock lock(mutex_);
    entries.splice(entries.end(), entries_);
  }
  for (Entry& entry : entries) entry.thread.join();
}

void LocalService::Accept() {
  for (;;) {
    absl::StatusOr<LocalSocket> socket = listener_.Accept(Now() + kAcceptFor);
    if (absl::IsCancelled(socket.status())) return;
    Collect();
    MutexLock lock(mutex_);
    if (stopping_) return;
    absl::Status why = socket.status();
    if (socket.ok()) {
      if (strangers_ >= kMostStrangers) EndOldestStranger();
      if (strangers_ < 2 * kMostStrangers && Add(*std::move(socket))) continue;
      why = absl::ResourceExhaustedError("too many callers at once");
    }
    if (absl::IsDeadlineExceeded(why)) continue;
    Warn(Message(why));
    if (!absl::IsPermissionDenied(why)) stop_.WaitUntil(mutex_, Now() + kPause);
  }
}

// So that callers who say nothing keep nobody out.
void LocalService::EndOldestStranger() {
  const auto oldest = std::find_if(entries_.begin(), entries_.end(),
                                   [](const Entry& entry) { return !entry.admitted && !entry.ending; });
  if (oldest == entries_.end()) return;
  oldest->ending = true;
  oldest->link->Close();
}

void LocalService::Warn(const std::string& why) {
  if (Now() < warn_at_) return;
  warn_at_ = Now() + kWarnEvery;
  spdlog::warn("a caller that asked for shared memory was sent away: {}", why);
}

bool LocalService::Add(LocalSocket socket) {
  const auto entry = entries_.emplace(entries_.end());
  entry->link = std::make_shared<LocalLink>(shard_, limits_, std::move(socket));
  try {
    entry->thread = std::thread([this, entry] { Run(entry); });
  } catch (const std::system_error&) {  // The system has no more threads.
    entries_.erase(entry);
    return false;
  }
  ++strangers_;
  return true;
}

void LocalService::Run(Entries::iterator entry) {
  const std::shared_ptr<LocalLink> link = [&] {
    MutexLock lock(mutex_);
    return entry->link;
  }();
  const absl::Status status = link->Run([&](const v1::Identity& id) { return Admit(id, *entry); });
  MutexLock lock(mutex_);
  if (!entry->admitted) {
    --strangers_;
    if (!status.ok() && !entry->ending) Warn(Message(status));
  } else if (!status.ok() && !absl::IsCancelled(status)) {
    spdlog::warn("{}", Message(Annotate(status, link->Name())));
  }
  std::erase_if(members_, [&](const auto& member) { return member.second.link == link; });
  entry->over = true;
}

absl::Status LocalService::Admit(const v1::Identity& id, Entry& entry) {
  if (!shard_.IsMember(id)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", id.rank(), ", incarnation ", id.incarnation(), " is no member of the job"));
  }
  MutexLock lock(mutex_);
  if (stopping_) return absl::CancelledError("the server is shutting down");
  Member& member = members_[id.rank()];
  if (member.link != nullptr) {
    if (member.incarnation == id.incarnation()) {  // Else this one replaces it, as the chief has logged.
      spdlog::warn("rank {}: it has asked for shared memory anew; its link before is ended", id.rank());
    }
    member.link->Close();
  }
  member = {.incarnation = id.incarnation(), .link = entry.link};
  entry.admitted = true;
  --strangers_;
  return absl::OkStatus();
}

void LocalService::Collect() {
  Entries over;
  {
    MutexLock lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto next = std::next(entry);
      if (entry->over) over.splice(over.end(), entries_, entry);
      entry = next;
    }
  }
  for (Entry& entry : over) entry.thread.join();
}

void LocalService::Tick() {
  const std::map<uint32_t, uint64_t> members = shard_.MemberIncarnations();
  const uint64_t version = shard_.version();
  const TimePoint now = Now();
  {
    MutexLock lock(mutex_);
    for (const auto& [rank, member] : members_) {
      const auto found = members.find(rank);
      if (found == members.end() || found->second != member.incarnation) member.link->Close();
      member.link->Tick(now, version);
    }
  }
  Collect();
}

std::vector<uint32_t> LocalService::ranks() const {
  MutexLock lock(mutex_);
  std::vector<uint32_t> ranks;
  ranks.reserve(members_.size());
  for (const auto& [rank, member] : members_) ranks.push_back(rank);
  return ranks;
}

}  // namespace ps
