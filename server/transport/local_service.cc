#include "server/transport/local_service.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include <spdlog/spdlog.h>
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr std::chrono::milliseconds kPause(100);  // It follows an error of accepting.
constexpr size_t kMostStrangers = 256;            // Callers that have not said yet who they are.
constexpr int kMostAccepted = 16;                 // At once.
constexpr std::chrono::seconds kGreeting(5);
constexpr std::chrono::seconds kWarnEvery(10);
constexpr std::chrono::milliseconds kLookEvery(5);  // At sockets, while links have something to say.
constexpr std::chrono::seconds kIdle(10);

// What epoll tells of, beside callers.
constexpr uint64_t kListener = 0;
constexpr uint64_t kBell = 1;

// Has epoll tell of these events. False: the system does not take it.
bool Watch(const FileDescriptor& poll, int file, uint32_t events, uint64_t number) {
  epoll_event event = {.events = events, .data = {.u64 = number}};
  if (epoll_ctl(poll.get(), EPOLL_CTL_ADD, file, &event) == 0) return true;
  return errno == EEXIST && epoll_ctl(poll.get(), EPOLL_CTL_MOD, file, &event) == 0;
}

}  // namespace

absl::Status LocalService::CheckSupported() {
  const auto tried = SharedMemory::Create("a first page", sizeof(float), SharedMemory::Access::kRead);
  return Annotate(tried.status(), "--shared_memory");
}

absl::StatusOr<std::unique_ptr<LocalService>> LocalService::Start(Shard& shard, CallCounts& counts,
                                                                  const std::string& path) {
  std::unique_ptr<UnixLock> path_lock;
  std::string at;  // Absolute, since workers have other working folders.
  if (!path.empty()) {
    at = std::filesystem::absolute(path).string();
    PS_ASSIGN_OR_RETURN(path_lock, UnixLock::Take("--local_socket=" + path, at));
    unlink(at.c_str());  // A server that was killed may have left it.
  }
  PS_ASSIGN_OR_RETURN(LocalListener listener,
                      Annotate(LocalListener::Listen(at), path.empty() ? "--shared_memory" : "--local_socket"));
  FileDescriptor poll(epoll_create1(EPOLL_CLOEXEC));
  if (!poll.valid()) return ResourceExhausted("--shared_memory: epoll_create1: ", std::strerror(errno));
  PS_ASSIGN_OR_RETURN(FileDescriptor wakes, Annotate(LocalChannel::MakeBell(), "--shared_memory"));
  if (!Watch(poll, listener.descriptor(), EPOLLIN, kListener) || !Watch(poll, wakes.get(), EPOLLIN | EPOLLET, kBell)) {
    return ResourceExhausted("--shared_memory: epoll_ctl: ", std::strerror(errno));
  }
  return std::unique_ptr<LocalService>(new LocalService(shard, counts, std::move(path_lock), std::move(listener),
                                                        std::move(poll),
                                                        std::make_shared<const FileDescriptor>(std::move(wakes))));
}

LocalService::LocalService(Shard& shard, CallCounts& counts, std::unique_ptr<UnixLock> path_lock,
                           LocalListener listener, FileDescriptor poll, std::shared_ptr<const FileDescriptor> wakes)
    : shard_(shard),
      counts_(counts),
      path_lock_(std::move(path_lock)),
      listener_(std::move(listener)),
      poll_(std::move(poll)),
      wakes_(std::move(wakes)),
      thread_([this] { Run(); }) {}

LocalService::~LocalService() {
  stopping_ = true;
  eventfd_write(wakes_->get(), 1);
  thread_.join();
}

void LocalService::Run() {
  Looking looking;
  TimePoint look_at = Now() + kLookEvery;
  while (!stopping_) {
    const bool came = Serve();
    const bool looks = came || looking.Again();
    if (came) looking.End(/*came=*/true);
    if (looks && Now() < look_at) continue;
    const bool told = Look(/*sleeps=*/!looks);
    if (!looks) looking.End(told);
    look_at = Now() + kLookEvery;
  }
  while (!callers_.empty()) End(callers_.begin(), absl::CancelledError("the server is shutting down"));
}

bool LocalService::Serve() {
  bool any = false;
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    if (!caller->second.admitted) {
      ++caller;
      continue;
    }
    const absl::StatusOr<bool> said = caller->second.link->Serve();
    any = any || !said.ok() || *said;
    caller = said.ok() ? std::next(caller) : End(caller, said.status());
  }
  return any;
}

// Whoever says something after it was told that this thread sleeps wakes it; what was said before is seen here.
bool LocalService::Look(bool sleeps) {
  std::chrono::nanoseconds longest{};
  bool has_work = false;
  for (auto& [number, caller] : callers_) {
    if (!caller.admitted) continue;
    if (sleeps) caller.link->channel()->SetSleeping(true);
    if (!caller.link->channel()->Flush()) caller.link->Close();
    has_work = has_work || caller.link->has_work();
  }
  if (sleeps && !has_work) longest = std::max<std::chrono::nanoseconds>(NextDeadline() - Now(), {});
  std::array<epoll_event, 64> events;
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(longest).count();
  const int told = epoll_wait(poll_.get(), events.data(), events.size(), static_cast<int>(milliseconds));
  for (auto& [number, caller] : callers_) {
    if (sleeps && caller.admitted) caller.link->channel()->SetSleeping(false);
  }
  bool calls = false;
  for (int i = 0; i < told; ++i) {
    const uint64_t number = events[static_cast<size_t>(i)].data.u64;
    calls = calls || number == kListener;
    if (number > kBell) OnSocket(number);
  }
  if (calls) Accept();  // After those who came before.
  if (listens_at_.has_value() && *listens_at_ <= Now()) SetListening(true);
  EndLateStrangers();
  return told > 0;
}

TimePoint LocalService::NextDeadline() {
  TimePoint next = Now() + kIdle;
  if (listens_at_.has_value()) next = std::min(next, *listens_at_);
  for (auto& [number, caller] : callers_) {
    if (!caller.admitted) next = std::min(next, caller.greets_until);
    const bool flushes = caller.admitted && caller.link->channel()->needs_room();
    if (flushes) next = std::min(next, Now() + LocalChannel::kRoomAfter);
  }
  return next;
}

void LocalService::SetListening(bool listens) {
  (void)Watch(poll_, listener_.descriptor(), listens ? uint32_t{EPOLLIN} : 0, kListener);
  listens_at_.reset();
  if (!listens) listens_at_ = Now() + kPause;
}

void LocalService::Accept() {
  for (int accepted = 0; accepted < kMostAccepted; ++accepted) {
    absl::StatusOr<LocalSocket> socket = listener_.Accept(Now());
    if (absl::IsDeadlineExceeded(socket.status())) return;
    if (socket.ok()) {
      Add(*std::move(socket));
      continue;
    }
    Warn(Message(socket.status()));
    if (!absl::IsPermissionDenied(socket.status())) return SetListening(false);
  }
}

// Callers who say nothing keep nobody out: the oldest goes, unless it has greeted meanwhile.
void LocalService::Add(LocalSocket socket) {
  if (strangers_ >= kMostStrangers) {
    const auto oldest =
        std::find_if(callers_.begin(), callers_.end(), [](const auto& caller) { return !caller.second.admitted; });
    const uint64_t number = oldest->first;
    OnSocket(number);
    const auto still = callers_.find(number);
    if (still != callers_.end() && !still->second.admitted) {
      End(still, absl::CancelledError("too many callers at once"));
    }
  }
  const uint64_t number = ++last_number_;
  if (!Watch(poll_, socket.descriptor(), EPOLLIN | EPOLLRDHUP | EPOLLET, number)) {
    return Warn(absl::StrCat("epoll_ctl: ", std::strerror(errno)));
  }
  callers_[number] = {.link = std::make_shared<LocalLink>(shard_, counts_, std::move(socket), wakes_),
                      .greets_until = Now() + kGreeting};
  ++strangers_;
}

void LocalService::OnSocket(uint64_t number) {
  const auto found = callers_.find(number);
  if (found == callers_.end()) return;
  Caller& caller = found->second;
  if (caller.admitted) return caller.link->PeerEnded();
  absl::StatusOr<bool> greeted = caller.link->Greet([&](const v1::Identity& id) { return Admit(id, caller); });
  if (!greeted.ok()) {
    End(found, greeted.status());
    return;
  }
  if (!*greeted) return;
  const LocalChannel& channel = *caller.link->channel();
  const bool watched = Watch(poll_, channel.socket(), EPOLLRDHUP | EPOLLET, number) &&
                       Watch(poll_, channel.bell(), EPOLLIN | EPOLLET, kBell);
  if (!watched) End(found, absl::ResourceExhaustedError(absl::StrCat("epoll_ctl: ", std::strerror(errno))));
}

void LocalService::EndLateStrangers() {
  const TimePoint now = Now();
  for (auto caller = callers_.begin(); strangers_ > 0 && caller != callers_.end();) {
    const bool late = !caller->second.admitted && caller->second.greets_until <= now;
    caller = late ? End(caller, absl::DeadlineExceededError("it has not said who it is")) : std::next(caller);
  }
}

LocalService::Callers::iterator LocalService::End(Callers::iterator caller, const absl::Status& why) {
  const std::shared_ptr<LocalLink> link = caller->second.link;
  // The member has the bell, too, so that it stays where it is watched.
  if (link->channel() != nullptr) epoll_ctl(poll_.get(), EPOLL_CTL_DEL, link->channel()->bell(), nullptr);
  link->End();
  if (!caller->second.admitted) {
    --strangers_;
    if (!absl::IsCancelled(why)) Warn(Message(why));
  } else if (!absl::IsCancelled(why)) {
    spdlog::warn("{}", Message(Annotate(why, link->Name())));
  }
  const auto after = callers_.erase(caller);
  View earlier;  // Released without the lock.
  MutexLock lock(mutex_);
  for (auto member = members_.begin(); member != members_.end(); ++member) {
    if (member->second.link != link) continue;
    earlier =
        std::exchange(views_[member->first], View{.incarnation = member->second.incarnation, .pin = link->TakeView()});
    members_.erase(member);
    break;
  }
  return after;
}

void LocalService::Warn(const std::string& why) {
  if (Now() < warn_at_) return;
  warn_at_ = Now() + kWarnEvery;
  spdlog::warn("a caller that asked for shared memory was sent away: {}", why);
}

absl::Status LocalService::Admit(const v1::Identity& id, Caller& caller) {
  if (!shard_.IsMember(id)) {
    return FailedPrecondition("rank ", id.rank(), ", incarnation ", id.incarnation(), " is no member of the job");
  }
  MutexLock lock(mutex_);
  Member& member = members_[id.rank()];
  if (member.link != nullptr) {
    if (member.incarnation == id.incarnation()) {  // Else this one replaces it, as the chief has logged.
      spdlog::warn("rank {}: it has asked for shared memory anew; its link before is ended", id.rank());
    }
    member.link->Close();
  }
  member = {.incarnation = id.incarnation(), .link = caller.link};
  caller.admitted = true;
  --strangers_;
  return absl::OkStatus();
}

void LocalService::Tick() {
  const std::map<uint32_t, uint64_t> members = shard_.MemberIncarnations();
  const uint64_t version = shard_.version();
  const TimePoint now = Now();
  std::vector<std::optional<VersionPin>> released;  // They go without the lock: the shard may go on with them.
  {
    MutexLock lock(mutex_);
    std::erase_if(views_, [&](auto& view) {
      const auto found = members.find(view.first);
      if (found != members.end() && found->second == view.second.incarnation) return false;
      released.push_back(std::move(view.second.pin));
      return true;
    });
    for (const auto& [rank, member] : members_) {
      const auto found = members.find(rank);
      if (found == members.end() || found->second != member.incarnation) member.link->Close();
      member.link->Tick(now, version);
    }
  }
}

std::vector<uint32_t> LocalService::ranks() const {
  MutexLock lock(mutex_);
  std::vector<uint32_t> ranks;
  ranks.reserve(members_.size());
  for (const auto& [rank, member] : members_) ranks.push_back(rank);
  return ranks;
}

}  // namespace ps
