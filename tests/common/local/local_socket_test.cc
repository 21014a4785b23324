#include "common/local/local_socket.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "common/local/shared_memory.h"
#include "common/status.h"
#include "tests/catch.h"
#include "tests/temp_folder.h"

namespace ps {
namespace {

TimePoint Soon() { return Now() + std::chrono::seconds(20); }
TimePoint Briefly() { return Now() + std::chrono::milliseconds(5); }

LocalListener Listening(const std::string& address = "") {
  absl::StatusOr<LocalListener> listener = LocalListener::Listen(address);
  REQUIRE(listener.ok());
  return *std::move(listener);
}

struct Pair {
  explicit Pair(const std::string& address = "") : listener(Listening(address)) {
    absl::StatusOr<LocalSocket> connected = LocalSocket::Connect(listener.address(), Soon());
    REQUIRE(connected.ok());
    absl::StatusOr<LocalSocket> accepted = listener.Accept(Soon());
    REQUIRE(accepted.ok());
    client = *std::move(connected);
    server = *std::move(accepted);
  }
  LocalListener listener;
  LocalSocket client, server;
};

TEST_CASE("Messages keep their bounds, and bring memory that both sides share") {
  Pair pair;
  absl::StatusOr<SharedMemory> ours = SharedMemory::Create("weights", 4096, SharedMemory::Access::kRead);
  REQUIRE(ours.ok());
  const int file = ours->file().get();
  REQUIRE(pair.server.Send("first", {}, Soon()).ok());
  REQUIRE(pair.server.Send(std::string(LocalSocket::kLongest, 'x'), {{file, file}}, Soon()).ok());
  auto first = pair.client.Receive(Soon());
  REQUIRE(first.ok());
  REQUIRE(first->has_value());
  CHECK((*first)->text == "first");
  CHECK((*first)->files.empty());
  auto second = pair.client.Receive(Soon());
  REQUIRE(second.ok());
  CHECK((*second)->text.size() == LocalSocket::kLongest);
  REQUIRE((*second)->files.size() == 2);
  ours->bytes()[7] = 9;
  absl::StatusOr<SharedMemory> theirs =
      SharedMemory::Attach("weights", std::move((*second)->files[1]), 4096, SharedMemory::Access::kRead);
  REQUIRE(theirs.ok());
  CHECK(theirs->bytes()[7] == 9);
  CHECK(absl::IsDeadlineExceeded(pair.client.Receive(Briefly()).status()));
}

TEST_CASE("A side that closes, shuts down or is killed is seen by the other at once") {
  for (const std::string how : {"close", "shutdown", "kill"}) {
    CAPTURE(how);
    Pair pair;
    if (how == "close") pair.client = LocalSocket();
    if (how == "shutdown") pair.client.Shutdown();
    if (how == "kill") {
      const pid_t child = fork();
      if (child == 0) {
        for (;;) pause();
      }
      pair.client = LocalSocket();  // The child holds the connection now, and this process's end of it.
      CHECK(absl::IsDeadlineExceeded(pair.server.Receive(Briefly()).status()));
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    const auto end = pair.server.Receive(Soon());
    REQUIRE(end.ok());
    CHECK_FALSE(end->has_value());
    CHECK(absl::IsUnavailable(pair.server.Send("x", {}, Soon())));
  }
}

TEST_CASE("A side that does not read stops the other at its deadline, and not for longer") {
  Pair pair;
  absl::Status status;
  for (int i = 0; i < 100000 && status.ok(); ++i) status = pair.server.Send(std::string(1000, 'x'), {}, Briefly());
  CHECK(absl::IsDeadlineExceeded(status));
  CHECK(Message(status) == "local socket " + pair.listener.address() + ": the other side does not read");
}

TEST_CASE("A message that is too long, or brings too many files, is refused, and no descriptor of it stays open") {
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  Pair pair;
  const auto before = descriptors();
  const std::string text(LocalSocket::kLongest + 1, 'x');
  REQUIRE(send(pair.client.descriptor(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  CHECK(absl::IsInvalidArgument(pair.server.Receive(Soon()).status()));
  const std::vector<int> files(LocalSocket::kMostFiles + 1, pair.client.descriptor());
  alignas(cmsghdr) char control[CMSG_SPACE((LocalSocket::kMostFiles + 1) * sizeof(int))] = {};
  char byte = 'x';
  iovec bytes = {.iov_base = &byte, .iov_len = 1};
  msghdr header = {};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
  std::memcpy(CMSG_DATA(rights), files.data(), files.size() * sizeof(int));
  REQUIRE(sendmsg(pair.client.descriptor(), &header, 0) == 1);
  CHECK(absl::IsInvalidArgument(pair.server.Receive(Soon()).status()));
  CHECK(descriptors() == before);
}

TEST_CASE("Where nobody listens a connection is refused, and what is no address, by its text") {
  CHECK(absl::IsUnavailable(LocalSocket::Connect("@ps-nobody", Soon()).status()));
  CHECK(absl::IsUnavailable(LocalSocket::Connect("/nowhere/socket", Soon()).status()));
  const std::string longest(108, 'x');
  for (const std::string& text : {std::string(""), std::string("@"), longest}) {
    const absl::Status status = LocalSocket::Connect(text, Soon()).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK(Message(status).find("local socket " + text + ": expected a path, or @ and a name") == 0);
  }
  CHECK(absl::IsInvalidArgument(LocalListener::Listen(longest).status()));
}

// Until its end, this process may open nothing.
class NoFiles {
 public:
  NoFiles() {
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit none = {.rlim_cur = 0, .rlim_max = before_.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  }
  ~NoFiles() { (void)setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_CASE("Where no more files may be open, the errors say that, not that nobody is there or a message was too long") {
  Pair pair;
  const int file = pair.client.descriptor();
  REQUIRE(pair.client.Send("with a file", {&file, 1}, Soon()).ok());
  absl::Status connected;
  absl::Status received;
  {
    const NoFiles none;
    connected = LocalSocket::Connect(pair.listener.address(), Soon()).status();
    received = pair.server.Receive(Soon()).status();
  }
  CHECK(absl::IsResourceExhausted(connected));
  CHECK(Message(connected) == "local socket " + pair.listener.address() + ": socket: Too many open files");
  CHECK(absl::IsInvalidArgument(received));
  CHECK(Message(received).ends_with(": more than 64 files came, or more than this process may have open"));
}

TEST_CASE("A listener that accepts nobody holds a connection up until its deadline") {
  const LocalListener listener = Listening();
  std::vector<LocalSocket> waiting;
  absl::Status status;
  while (status.ok() && waiting.size() < 1000) {
    absl::StatusOr<LocalSocket> next = LocalSocket::Connect(listener.address(), Briefly());
    status = next.status();
    if (next.ok()) waiting.push_back(*std::move(next));
  }
  CHECK(absl::IsDeadlineExceeded(status));
}

TEST_CASE("A listener's path is taken until it ends, then removed, and a shutdown ends its wait") {
  const TempFolder folder;
  const std::string path = folder.File("socket");
  {
    Pair pair(path);
    CHECK(absl::IsFailedPrecondition(LocalListener::Listen(path).status()));
    CHECK(absl::IsDeadlineExceeded(pair.listener.Accept(Briefly()).status()));
    absl::Status status;
    std::thread waiting([&] { status = pair.listener.Accept(Soon()).status(); });
    pair.listener.Shutdown();
    waiting.join();
    CHECK(absl::IsCancelled(status));
  }
  CHECK_FALSE(std::filesystem::exists(path));
}

TEST_CASE("A process of another user is sent away, and sends the other away") {
  if (geteuid() != 0) PS_SKIP("only root can be another user");
  LocalListener listener = Listening();
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    _exit(absl::IsPermissionDenied(LocalSocket::Connect(listener.address(), Soon()).status()) ? 0 : 1);
  }
  const absl::Status accepted = listener.Accept(Soon()).status();
  CHECK(absl::IsPermissionDenied(accepted));
  CHECK(Message(accepted).find("the other side is of user 65534, this one of user 0") != std::string::npos);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace
}  // namespace ps
