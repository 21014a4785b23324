#include "server/unix_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr int kTries = 100;  // Each of them found a lock file that its owner removed that moment.

// Whether the open file still has this name.
bool HasName(int file, const std::string& path) {
  struct stat open_file = {};
  struct stat named = {};
  return fstat(file, &open_file) == 0 && lstat(path.c_str(), &named) == 0 && open_file.st_dev == named.st_dev &&
         open_file.st_ino == named.st_ino;
}

// Whether somebody takes connections at the path. A listener whose queue is full is one, too.
bool Answers(const std::string& path) {
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (probe < 0) return false;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const bool answers = connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
                       errno == EAGAIN || errno == EINPROGRESS ||
                       errno == EPROTOTYPE;  // The last: a socket of another type.
  close(probe);
  return answers;
}

absl::Status CheckPath(const std::string& flag, const std::string& path) {
  struct stat about = {};
  if (lstat(path.c_str(), &about) != 0) return absl::OkStatus();
  if (!S_ISSOCK(about.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, " exists and is not a socket"));
  }
  if (!Answers(path)) return absl::OkStatus();  // What a killed server left; gRPC removes it.
  return absl::FailedPreconditionError(absl::StrCat(flag, ": another process is already listening there"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixLock>> UnixLock::Take(const std::string& flag, const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, ": the path has ", path.size(), " bytes; a socket's has at most ", sizeof(sockaddr_un::sun_path) - 1));
  }
  const std::string lock_path = path + ".lock";
  for (int tries = 0; tries < kTries; ++tries) {
    const int file = open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": ", lock_path, ": ", std::strerror(errno)));
    }
    absl::Cleanup shut = [file] { close(file); };
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) {
        return absl::InvalidArgumentError(absl::StrCat(flag, ": ", lock_path, ": locking: ", std::strerror(errno)));
      }
      return absl::FailedPreconditionError(absl::StrCat(flag, ": another server is using this path"));
    }
    if (!HasName(file, lock_path)) continue;  // Its owner removed it between our open and our lock.
    std::move(shut).Cancel();
    std::unique_ptr<UnixLock> lock(new UnixLock(lock_path, file));
    PS_RETURN_IF_ERROR(CheckPath(flag, path));
    return lock;
  }
  return absl::FailedPreconditionError(
      absl::StrCat(flag, ": ", lock_path, " is being removed and created again by others"));
}

UnixLock::~UnixLock() {
  // Whoever opened it before sees, once it has the lock, that the name is gone.
  if (HasName(file_, lock_path_)) unlink(lock_path_.c_str());
  close(file_);
}

}  // namespace ps
