// What is said when a listener has no room for more connections.
#include "server/transport/listener.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/sync.h"
#include "tests/catch.h"
#include "tests/log_text.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

// Keeps what it is given.
class KeepingAcceptor final : public Listener::Acceptor {
 public:
  void HandleNewConnection(NewConnectionParameters* parameters) override { kept_.emplace_back(parameters->fd); }

 private:
  std::vector<FileDescriptor> kept_;
};

FileDescriptor Connect(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  FileDescriptor caller(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(connect(caller.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return caller;
}

// What a listener with these limits says once it is full.
std::string SaidWhenFull(uint64_t max_descriptors, uint64_t max_connections) {
  rlimit before = {};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit limit = {.rlim_cur = max_descriptors, .rlim_max = before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  LogText log;
  const TempFolder folder;
  Mutex mutex;
  CondVar changed;
  bool full = false;
  auto listener = Listener::Listen("--listen", *ParseEndpoint("listen", "unix:" + folder.File("socket")),
                                   std::chrono::seconds(10), max_connections);
  REQUIRE(listener.ok());
  (*listener)->Start(std::make_unique<KeepingAcceptor>(), [&](bool room) {
    MutexLock lock(mutex);
    full = full || !room;
    changed.NotifyAll();
  });
  std::vector<FileDescriptor> callers;
  callers.reserve(80);
  for (int i = 0; i < 80; ++i) callers.push_back(Connect(folder.File("socket")));
  {
    MutexLock lock(mutex);
    const TimePoint deadline = Now() + std::chrono::minutes(2);
    while (!full && changed.WaitUntil(mutex, deadline)) {
    }
    CHECK(full);
  }
  (*listener)->Stop();
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  return log.Take();
}

TEST_CASE("A listener that is full says whether the limit is the system's or its own") {
  CHECK(SaidWhenFull(4096, 64).find("no room for more connections: this server takes no more than 64 at a time; ") !=
        std::string::npos);
  CHECK(SaidWhenFull(160, Listener::kMaxConnections)
            .find("no room for more connections: this process has 120 descriptors open, of 160 that it may have "
                  "(ulimit -n); ") != std::string::npos);
}

}  // namespace
}  // namespace ps
