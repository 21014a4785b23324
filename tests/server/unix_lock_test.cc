#include "server/transport/listener.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "common/status.h"
#include "server/server.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

// A bound socket, which stays in the file system when it is closed, as that of a killed server.
class Socket {
 public:
  explicit Socket(const std::string& path) : socket_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    REQUIRE(bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  }
  ~Socket() { close(socket_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  void Listen() const { REQUIRE(listen(socket_, 1) == 0); }

 private:
  const int socket_;
};

TEST_CASE("A second server on a Unix socket is refused, and the first can still be reached") {
  const TempFolder folder;
  ServerOptions options;
  options.listen = "unix:" + folder.File("socket");
  auto first = Server::Start(options);
  REQUIRE(first.ok());
  const auto second = Server::Start(options);
  REQUIRE_FALSE(second.ok());
  CHECK(Message(second.status()) == "--listen=" + options.listen + ": another server is using this path");
  CHECK(std::filesystem::is_socket(folder.File("socket")));
  first->reset();
  CHECK_FALSE(std::filesystem::exists(folder.File("socket.lock")));
  CHECK(Server::Start(options).ok());
}

TEST_CASE("The socket and the lock file of a killed server do not prevent a start") {
  const TempFolder folder;
  ServerOptions options;
  options.listen = "unix:" + folder.File("socket");
  std::ofstream(folder.File("socket.lock")) << "";
  { const Socket killed(folder.File("socket")); }
  CHECK(Server::Start(options).ok());
}

TEST_CASE("A path where somebody else listens, or that is no socket or cannot be one, is refused by its flag") {
  const TempFolder folder;
  const std::string path = folder.File("socket");
  const auto refused = [](const std::string& where) {
    return Message(UnixLock::Take("--listen=unix:" + where, where).status());
  };
  {
    const Socket other(path);
    other.Listen();
    CHECK(refused(path) == "--listen=unix:" + path + ": another process is already listening there");
  }
  std::filesystem::remove(path);
  std::ofstream(path) << "precious";
  CHECK(refused(path) == "--listen=unix:" + path + ": " + path + " exists and is not a socket");
  CHECK(std::filesystem::file_size(path) == 8);
  const std::string longer = folder.File(std::string(120, 'x'));
  CHECK(refused(longer).find("a socket's has at most 107") != std::string::npos);
  const std::string nowhere = folder.File("no/socket");
  CHECK(refused(nowhere).find("--listen=unix:" + nowhere + ": " + nowhere + ".lock: No such file") == 0);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
}

TEST_CASE("However many take and release a path at once, one has it at a time") {
  const TempFolder folder;
  std::atomic<int> holders = 0;
  std::atomic<int> taken = 0;
  std::atomic<bool> shared = false;
  std::vector<std::jthread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        const auto lock = UnixLock::Take("--listen", folder.File("socket"));
        if (!lock.ok()) continue;
        if (++holders != 1) shared = true;
        ++taken;
        --holders;
      }
    });
  }
  threads.clear();
  CHECK(taken > 0);
  CHECK_FALSE(shared);
}

}  // namespace
}  // namespace ps
