// When a listener has no more descriptors: this test's own process is the one that has few.
#include "server/transport/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "common/sync.h"
#include "tests/catch.h"
#include "tests/log_text.h"

namespace ps::listener_test {
namespace {

constexpr std::chrono::minutes kLong(2);

// While it lives this process may have no more descriptors than this.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t limit) {
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    rlimit few = before_;
    few.rlim_cur = limit;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
  }
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

  // Takes all that are left, as copies of this one.
  static std::vector<FileDescriptor> TakeAll(const FileDescriptor& any) {
    std::vector<FileDescriptor> all;
    while (true) {
      FileDescriptor next(fcntl(any.get(), F_DUPFD_CLOEXEC, 0));
      if (!next.valid()) return all;
      all.push_back(std::move(next));
    }
  }

 private:
  rlimit before_ = {};
};

// What a listener hands over and says.
struct Heard {
  Mutex mutex;
  CondVar changed;
  std::vector<FileDescriptor> connections ABSL_GUARDED_BY(mutex);
  std::vector<bool> room ABSL_GUARDED_BY(mutex);  // What was said of it, in order.

  std::vector<bool> WaitForRoom(size_t count) {
    MutexLock lock(mutex);
    const TimePoint deadline = Now() + kLong;
    while (room.size() < count && changed.WaitUntil(mutex, deadline)) {
    }
    return room;
  }
  // For so many, or until there is no room.
  bool WaitForConnectionOrNoRoom(size_t count) {
    MutexLock lock(mutex);
    const TimePoint deadline = Now() + kLong;
    while (connections.size() < count && room.empty() && changed.WaitUntil(mutex, deadline)) {
    }
    return room.empty() && connections.size() == count;
  }
  size_t WaitForConnections(size_t count) {
    MutexLock lock(mutex);
    const TimePoint deadline = Now() + kLong;
    while (connections.size() < count && changed.WaitUntil(mutex, deadline)) {
    }
    return connections.size();
  }
  void CloseAll() {
    MutexLock lock(mutex);
    connections.clear();
  }
};

class KeepingAcceptor final : public Listener::Acceptor {
 public:
  explicit KeepingAcceptor(Heard& heard) : heard_(heard) {}
  void HandleNewConnection(NewConnectionParameters* parameters) override {
    MutexLock lock(heard_.mutex);
    heard_.connections.emplace_back(parameters->fd);
    heard_.changed.NotifyAll();
  }

 private:
  Heard& heard_;
};

std::unique_ptr<Listener> Listening(Heard& heard) {
  absl::StatusOr<std::unique_ptr<Listener>> listener =
      Listener::Listen("--listen", *ParseEndpoint("listen", "127.0.0.1:0"), std::chrono::seconds(10));
  REQUIRE(listener.ok());
  (*listener)->Start(std::make_unique<KeepingAcceptor>(heard), [&heard](bool room) {
    MutexLock lock(heard.mutex);
    heard.room.push_back(room);
    heard.changed.NotifyAll();
  });
  return *std::move(listener);
}

FileDescriptor NewSocket() { return FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

// The system completes it, whether or not the listener takes it in.
void Connect(const FileDescriptor& socket, const Listener& listener) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(listener.endpoint().port));
  REQUIRE(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
}

std::chrono::nanoseconds CpuTime() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

TEST_CASE(
    "Callers past the room for connections are sent away, and it is said once that there is none, then that there is") {
  const LogText log;
  const FewDescriptors few(128);
  Heard heard;
  const std::unique_ptr<Listener> listener = Listening(heard);
  std::vector<FileDescriptor> callers;
  do {  // Each takes two: the caller's and the listener's, which closes it when it sends the caller away.
    callers.push_back(NewSocket());
    REQUIRE(callers.back().valid());
    Connect(callers.back(), *listener);
  } while (heard.WaitForConnectionOrNoRoom(callers.size()));
  char nothing = 0;
  CHECK(recv(callers.back().get(), &nothing, 1, 0) <= 0);
  CHECK(heard.WaitForRoom(1) == std::vector<bool>{false});
  callers.clear();
  heard.CloseAll();
  CHECK(heard.WaitForRoom(2) == std::vector<bool>{false, true});
  const FileDescriptor next = NewSocket();
  Connect(next, *listener);
  CHECK(heard.WaitForConnections(1) == 1);
}

TEST_CASE("Without a single descriptor a listener rests, and takes in who has waited once there are some again") {
  const LogText log;
  const FewDescriptors few(128);
  Heard heard;
  const std::unique_ptr<Listener> listener = Listening(heard);
  const FileDescriptor caller = NewSocket();
  std::vector<FileDescriptor> all = FewDescriptors::TakeAll(caller);
  Connect(caller, *listener);
  CHECK(heard.WaitForRoom(1) == std::vector<bool>{false});

  // For as long as it would take to be sure, it does nothing to speak of.
  const TimePoint begin = Now();
  const std::chrono::nanoseconds used = CpuTime();
  {
    Mutex mutex;
    CondVar never;
    MutexLock lock(mutex);
    while (Now() < begin + std::chrono::milliseconds(500))
      never.WaitUntil(mutex, begin + std::chrono::milliseconds(500));
  }
  CHECK(CpuTime() - used < (Now() - begin) / 4);
  CHECK(heard.WaitForConnections(0) == 0);

  all.clear();
  CHECK(heard.WaitForConnections(1) == 1);
  CHECK(heard.WaitForRoom(2) == std::vector<bool>{false, true});
}

}  // namespace
}  // namespace ps::listener_test
