#include "common/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace ps {
namespace {

constexpr size_t kWriteBytes = 8 << 20;  // One call writes no more.

// Nobody else's: processes in containers that share a folder may have the same number.
std::string TemporaryName(const std::string& path) {
  return absl::StrCat(path, ".tmp-", getpid(), "-", absl::Hex(std::random_device()()));
}

int OpenNew(const std::string& path) { return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666); }

}  // namespace

absl::Status FileError(const std::string& path, const std::string& what) {
  return Internal(path, ": ", what, ": ", std::strerror(errno));
}

absl::StatusOr<NewFile> NewFile::Create(const std::string& path) {
  std::string temporary = TemporaryName(path);
  const int file = OpenNew(temporary);
  if (file < 0) return FileError(temporary, "opening");
  return NewFile(path, std::move(temporary), file);
}

NewFile::~NewFile() {
  if (file_.valid()) unlink(temporary_.c_str());
}

absl::Status NewFile::Append(std::span<const char> bytes) {
  PS_RETURN_IF_ERROR(failed_);
  while (!bytes.empty()) {
    const ssize_t written = write(file_.get(), bytes.data(), std::min(bytes.size(), kWriteBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed_ = FileError(temporary_, "writing");
    bytes = bytes.subspan(static_cast<size_t>(written));
    appended_ += static_cast<size_t>(written);
    StartWriteBack();
  }
  return absl::OkStatus();
}

// The disk begins with what is there already, so that fsync has less to wait for. It promises nothing: errors are
// fsync's.
void NewFile::StartWriteBack() {
  if (appended_ - started_ < kWriteBytes) return;
  (void)sync_file_range(file_.get(), static_cast<off64_t>(started_), static_cast<off64_t>(appended_ - started_),
                        SYNC_FILE_RANGE_WRITE);
  started_ = appended_;
}

absl::Status NewFile::Commit() {
  PS_RETURN_IF_ERROR(failed_);
  if (fsync(file_.get()) != 0) return failed_ = FileError(temporary_, "fsync");
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return failed_ = FileError(path_, "renaming");
  file_.Close();
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  return SyncFolder(folder.empty() ? "." : folder);
}

absl::Status SyncFolder(const std::string& path) {
  const FileDescriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.valid()) return FileError(path, "opening");
  return fsync(folder.get()) == 0 ? absl::OkStatus() : FileError(path, "fsync");
}

absl::Status WriteFileAtomically(const std::string& path, const std::vector<std::span<const char>>& parts) {
  PS_ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path));
  for (const auto& part : parts) PS_RETURN_IF_ERROR(file.Append(part));
  return file.Commit();
}

absl::StatusOr<OpenFile> OpenFile::Open(const std::string& path) {
  // Opening a pipe for reading would wait for its writer.
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid() && (errno == ENOENT || errno == ENOTDIR)) {
    return absl::NotFoundError(path + ": the file cannot be opened: there is no such file");
  }
  struct stat about = {};
  if (!file.valid() || fstat(file.get(), &about) != 0) return FileError(path, "opening");
  if (!S_ISREG(about.st_mode)) return absl::InvalidArgumentError(path + ": not a regular file");
  return OpenFile{.path = path, .file = std::move(file), .bytes = static_cast<uint64_t>(about.st_size)};
}

absl::Status OpenFile::Read(uint64_t at, std::span<char> to) const {
  while (!to.empty()) {
    const ssize_t got = pread(file.get(), to.data(), to.size(), static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(path, "reading");
    if (got == 0) return absl::InvalidArgumentError(path + ": it has become shorter");
    to = to.subspan(static_cast<size_t>(got));
    at += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t max_bytes) {
  PS_ASSIGN_OR_RETURN(const OpenFile file, OpenFile::Open(path));
  if (file.bytes > max_bytes) return InvalidArgument(path, ": it has ", file.bytes, " bytes, more than ", max_bytes);
  std::string bytes(file.bytes, '\0');
  PS_RETURN_IF_ERROR(file.Read(0, bytes));
  return bytes;
}

absl::Status CheckWritable(const std::string& flag, const std::string& path) {
  const auto wrong = [&](const std::string& why) {
    return InvalidArgument("--", flag, "=", path, ": cannot be written: ", why);
  };
  struct stat about = {};
  if (lstat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode)) return wrong("it exists and is not a regular file");
  const std::string temporary = TemporaryName(path);
  const FileDescriptor file(OpenNew(temporary));
  if (!file.valid()) return wrong(std::strerror(errno));
  unlink(temporary.c_str());
  return absl::OkStatus();
}

}  // namespace ps
