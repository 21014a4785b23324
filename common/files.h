// Files that appear whole or not at all: a temporary name, fsync, rename, fsync of the folder.
#pragma once

#include <unistd.h>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ps {

// A file descriptor that somebody owns: it is closed with this. Movable.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  // Takes it over; negative: there is none.
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  FileDescriptor(FileDescriptor&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    Close();
    descriptor_ = std::exchange(other.descriptor_, -1);
    return *this;
  }
  ~FileDescriptor() { Close(); }

  int get() const { return descriptor_; }
  bool valid() const { return descriptor_ >= 0; }
  // Gives it up to the caller.
  int Release() { return std::exchange(descriptor_, -1); }
  void Close() {
    if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
  }

 private:
  int descriptor_ = -1;
};

// A file in the making, under a temporary name beside its own. Errors name the file; after one the file cannot be
// committed. Without Commit nothing of it stays. Movable; for one thread at a time.
class NewFile {
 public:
  static absl::StatusOr<NewFile> Create(const std::string& path);
  NewFile(NewFile&&) noexcept = default;
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile();

  absl::Status Append(std::span<const char> bytes);
  // On disk, under its name, in place of what had that name. Waits for the disk. Once.
  absl::Status Commit();

 private:
  NewFile(std::string path, std::string temporary, int file)
      : path_(std::move(path)), temporary_(std::move(temporary)), file_(file) {}
  void StartWriteBack();

  std::string path_;
  std::string temporary_;
  FileDescriptor file_;
  size_t appended_ = 0;  // Bytes.
  size_t started_ = 0;   // Bytes that were handed to the disk.
  absl::Status failed_;
};

// Replaces `path` by these bytes, in this way.
absl::Status WriteFileAtomically(const std::string& path, const std::vector<std::span<const char>>& parts);

// A file that is open for reading. Errors name the file.
struct OpenFile {
  // NOT_FOUND: there is none. INVALID_ARGUMENT: it is not a regular file.
  static absl::StatusOr<OpenFile> Open(const std::string& path);
  // Fills `to` with the bytes from `at` on. INVALID_ARGUMENT: there are not as many.
  absl::Status Read(uint64_t at, std::span<char> to) const;

  std::string path;
  FileDescriptor file;
  uint64_t bytes = 0;
};

// All of a file that is held in memory. Errors are those of OpenFile; INVALID_ARGUMENT also if it has more than this
// many bytes.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, uint64_t max_bytes);

// Whether `path` could be written in this way now: its folder is there and takes files, and what has the name already,
// if anything, is a regular file. (A device or pipe, which root could replace, is left alone, and so is a symbolic
// link.) INVALID_ARGUMENT, naming the flag, with the reason. Makes and removes the temporary file.
absl::Status CheckWritable(const std::string& flag, const std::string& path);

// What a folder contains is on disk: a name in it that was made, renamed or removed.
absl::Status SyncFolder(const std::string& path);

// The error of a system call that has just failed: "PATH: WHAT: No space left on device".
absl::Status FileError(const std::string& path, const std::string& what);

}  // namespace ps
