#include "common/local/local_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kBacklog = 512;
constexpr size_t kNameBytes = 16;

absl::Status Error(absl::StatusCode code, const std::string& address, std::string_view what) {
  return absl::Status(code, absl::StrCat("local socket ", address, ": ", std::string(what)));
}

absl::Status Errno(absl::StatusCode code, const std::string& address, std::string_view call) {
  return Error(code, address, absl::StrCat(std::string(call), ": ", std::strerror(errno)));
}

struct Address {
  sockaddr_un value = {.sun_family = AF_UNIX, .sun_path = {}};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

absl::StatusOr<Address> AddressOf(const std::string& text) {
  Address address;
  const bool name = text.starts_with('@');
  if (text.size() < (name ? 2 : 1) || text.size() >= sizeof(address.value.sun_path)) {
    return Error(
        absl::StatusCode::kInvalidArgument, text,
        absl::StrCat("expected a path, or @ and a name, of less than ", sizeof(address.value.sun_path), " bytes"));
  }
  std::memcpy(address.value.sun_path, text.data(), text.size());
  if (name) address.value.sun_path[0] = '\0';
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size() + (name ? 0 : 1));
  return address;
}

FileDescriptor MakeSocket(int flags) {
  return FileDescriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
}

// Until the descriptor may be read or written, or has an end or an error: poll(2)'s events. 0: `deadline` came first.
int Await(const FileDescriptor& file, short events, TimePoint deadline) {
  for (;;) {
    pollfd poll = {.fd = file.get(), .events = events, .revents = 0};
    const auto left = std::max<std::chrono::nanoseconds>(deadline - Now(), {});
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec time = {.tv_sec = seconds.count(), .tv_nsec = (left - seconds).count()};
    const int ready = ppoll(&poll, 1, &time, nullptr);
    if (ready > 0) return poll.revents;
    if (ready == 0 && left.count() == 0) return 0;
    if (ready < 0 && errno != EINTR) return POLLERR;
  }
}

std::vector<FileDescriptor> FilesIn(msghdr& header) {
  std::vector<FileDescriptor> files;
  for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr; control = CMSG_NXTHDR(&header, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      files.emplace_back(file);
    }
  }
  return files;
}

}  // namespace

absl::StatusOr<LocalSocket> LocalSocket::Connect(const std::string& address, TimePoint deadline) {
  PS_ASSIGN_OR_RETURN(const Address to, AddressOf(address));
  LocalSocket connected(MakeSocket(0), address);
  if (!connected.file_.valid()) return Errno(absl::StatusCode::kResourceExhausted, address, "socket");
  for (;;) {
    // connect waits so long while too many connections wait to be accepted.
    const auto left = std::max<std::chrono::microseconds>(
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - Now()), std::chrono::microseconds(1));
    const timeval time = {.tv_sec = left.count() / 1'000'000, .tv_usec = left.count() % 1'000'000};
    setsockopt(connected.descriptor(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
    if (connect(connected.descriptor(), to.get(), to.size) == 0) break;
    const int error = errno;
    if (error == EACCES || error == EPERM) return Errno(absl::StatusCode::kPermissionDenied, address, "connect");
    if (error != EAGAIN && error != EINTR) return Errno(absl::StatusCode::kUnavailable, address, "connect");
    if (Now() >= deadline) return Error(absl::StatusCode::kDeadlineExceeded, address, "nobody accepts the connection");
  }
  fcntl(connected.descriptor(), F_SETFL, O_NONBLOCK);
  PS_RETURN_IF_ERROR(connected.CheckUser());
  return connected;
}

absl::Status LocalSocket::CheckUser() const {
  ucred other = {};
  socklen_t size = sizeof(other);
  if (getsockopt(file_.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) != 0) {
    return Errno(absl::StatusCode::kUnavailable, address_, "SO_PEERCRED");
  }
  if (other.uid == geteuid()) return absl::OkStatus();
  return Error(absl::StatusCode::kPermissionDenied, address_,
               absl::StrCat("the other side is of user ", other.uid, ", this one of user ", geteuid()));
}

absl::Status LocalSocket::Send(std::string_view text, std::span<const int> files, TimePoint deadline) {
  Check(!text.empty() && text.size() <= kLongest && files.size() <= kMostFiles, "a message is within its limits");
  iovec bytes = {.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))] = {};
  msghdr header = {};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  if (!files.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(files.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(files.size_bytes());
    std::memcpy(CMSG_DATA(rights), files.data(), files.size_bytes());
  }
  while (sendmsg(file_.get(), &header, MSG_NOSIGNAL) < 0) {
    if (errno != EAGAIN && errno != EINTR) return Errno(absl::StatusCode::kUnavailable, address_, "sending");
    if (Await(file_, POLLOUT, deadline) == 0) {
      return Error(absl::StatusCode::kDeadlineExceeded, address_, "the other side does not read");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<LocalSocket::Message>> LocalSocket::Receive(TimePoint deadline) {
  Message message;
  message.text.resize(kLongest);
  iovec bytes = {.iov_base = message.text.data(), .iov_len = message.text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))];
  msghdr header = {};
  header.msg_iov = &bytes;
  header.msg_iovlen = 1;
  ssize_t size = 0;
  for (;;) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    size = recvmsg(file_.get(), &header, MSG_CMSG_CLOEXEC);
    if (size >= 0) break;
    if (errno == ECONNRESET) return std::nullopt;
    if (errno != EAGAIN && errno != EINTR) return Errno(absl::StatusCode::kUnavailable, address_, "receiving");
    if (Await(file_, POLLIN, deadline) == 0) {
      return Error(absl::StatusCode::kDeadlineExceeded, address_, "no message came");
    }
  }
  if (size == 0) return std::nullopt;
  message.files = FilesIn(header);  // Owned from here on, also if they are refused.
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, address_,
                 absl::StrCat("a message of more than ", kLongest, " bytes"));
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, address_,
                 absl::StrCat("more than ", kMostFiles, " files came, or more than this process may have open"));
  }
  message.text.resize(static_cast<size_t>(size));
  return message;
}

void LocalSocket::Shutdown() { shutdown(file_.get(), SHUT_RDWR); }

absl::StatusOr<LocalListener> LocalListener::Listen(const std::string& address) {
  std::string at = address;
  if (at.empty()) {
    char name[kNameBytes];
    Check(getrandom(name, sizeof(name), 0) == sizeof(name), "the system has random bytes");
    at = absl::StrCat("@ps-", absl::BytesToHexString(absl::string_view(name, sizeof(name))));
  }
  PS_ASSIGN_OR_RETURN(const Address bound, AddressOf(at));
  FileDescriptor file = MakeSocket(SOCK_NONBLOCK);
  if (!file.valid()) return Errno(absl::StatusCode::kResourceExhausted, at, "socket");
  if (bind(file.get(), bound.get(), bound.size) != 0) return Errno(absl::StatusCode::kFailedPrecondition, at, "bind");
  LocalListener listener(std::move(file), at);
  if (listen(listener.file_.get(), kBacklog) != 0) return Errno(absl::StatusCode::kFailedPrecondition, at, "listen");
  return listener;
}

LocalListener::~LocalListener() {
  if (file_.valid() && !address_.starts_with('@')) unlink(address_.c_str());
}

absl::StatusOr<LocalSocket> LocalListener::Accept(TimePoint deadline) {
  for (;;) {
    FileDescriptor file(accept4(file_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (file.valid()) {
      LocalSocket accepted(std::move(file), address_);
      PS_RETURN_IF_ERROR(accepted.CheckUser());
      return accepted;
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      return Errno(absl::StatusCode::kResourceExhausted, address_, "accept");
    }
    const int events = Await(file_, POLLIN, deadline);
    if (events == 0) return Error(absl::StatusCode::kDeadlineExceeded, address_, "nobody came");
    if ((events & POLLHUP) != 0) return Error(absl::StatusCode::kCancelled, address_, "it is shut down");
  }
}

void LocalListener::Shutdown() { shutdown(file_.get(), SHUT_RDWR); }

}  // namespace ps
